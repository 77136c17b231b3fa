"""Functions of torchmetrics that no recipe can name, and what they need. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

_NEEDS: dict[str, Sequence[str]] = {
    "generated text": (
        "bert_score", "bleu_score", "char_error_rate", "chrf_score", "edit_distance",
        "extended_edit_distance", "infolm", "match_error_rate", "rouge_score", "sacre_bleu_score",
        "translation_edit_rate", "word_error_rate", "word_information_lost",
        "word_information_preserved",
    ),
    "texts and images": ("clip_score",),
    "images without targets": ("arniqa", "image_gradients", "total_variation"),
    "images and a pretrained network": (
        "clip_image_quality_assessment", "deep_image_structure_and_texture_similarity",
        "learned_perceptual_image_patch_similarity",
    ),
    "a generator of images": ("perceptual_path_length",),
    "images of several sensors": ("quality_with_no_reference", "spatial_distortion_index"),
    "sound and a package of its own": (
        "deep_noise_suppression_mean_opinion_score", "non_intrusive_speech_quality_assessment",
        "perceptual_evaluation_speech_quality", "short_time_objective_intelligibility",
        "speech_reverberation_modulation_energy_ratio",
    ),
    "a function that compares speakers": ("permutation_invariant_training", "pit_permutate"),
    "queries with documents": (
        "retrieval_auroc", "retrieval_average_precision", "retrieval_fall_out",
        "retrieval_hit_rate", "retrieval_normalized_dcg", "retrieval_precision",
        "retrieval_precision_recall_curve", "retrieval_r_precision", "retrieval_recall",
        "retrieval_reciprocal_rank",
    ),
    "every class in every map (torchmetrics fails where one is missing)": (
        "hausdorff_distance",
    ),
    "maps of classes and instances": ("modified_panoptic_quality", "panoptic_quality"),
    "boxes": (
        "complete_intersection_over_union", "distance_intersection_over_union",
        "generalized_intersection_over_union", "intersection_over_union",
    ),
    "a group of each sample": (
        "binary_fairness", "binary_groups_stat_rates", "demographic_parity", "equal_opportunity",
    ),
    "embeddings of the samples": (
        "calinski_harabasz_score", "davies_bouldin_score", "dunn_index",
        "pairwise_cosine_similarity", "pairwise_euclidean_distance", "pairwise_linear_similarity",
        "pairwise_manhattan_distance", "pairwise_minkowski_distance",
    ),
    "the package torch-linear-assignment": ("cluster_accuracy",),
    "a matrix of variables": (
        "cramers_v_matrix", "pearsons_contingency_coefficient_matrix", "theils_u_matrix",
        "tschuprows_t_matrix",
    ),
    "ratings of several raters": ("fleiss_kappa",),
    "several predictions of each target": ("continuous_ranked_probability_score",),
    "frames of a video": ("video_multi_method_assessment_fusion",),
}  # fmt: skip


def explain_unsupported(supported: Sequence[str]) -> dict[str, str]:
    """Return the end of the message of each name that is refused, with `{task}` for the task.

    Args:
        supported: the names that recipes can give.
    """
    found = {
        name: f'needs {need}, which the task "{{task}}" does not give'
        for need, names in _NEEDS.items()
        for name in names
    }
    for kind in ("binary", "multiclass", "multilabel"):
        for name in supported:
            text = f'is written "{name}": the task "{{task}}" says what its outputs are'
            found.setdefault(f"{kind}_{name}", text)
    return {name: text for name, text in found.items() if name not in supported}
