"""Writes the table of torchmetrics' functions: `python -m tests.tasks.metrics.table`.

Recipes are checked by this table, because validation must not import torchmetrics.
"""

from __future__ import annotations

import inspect
import json
import types
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import torch
import torchmetrics

from trainer.engine.tasks.metrics.unsupported import explain_unsupported

PATH = Path(__file__).parents[3] / "engine" / "tasks" / "metrics" / "torchmetrics.json"
INPUTS = [
    ("preds", "target"), ("preds", "targets"), ("p", "q"), ("point_cloud1", "point_cloud2"),
    ("vertices_pred", "vertices_gt"),
]  # fmt: skip
CLASS_KINDS = ("binary", "multiclass", "multilabel")
# The task gives these, or a row has no place for what they make.
NOT_KEYS = {
    "task", "num_classes", "num_labels", "num_outputs", "validate_args", "multidim_average",
    "t_test", "alternative", "keep_sequence_dim", "return_full_image",
    "return_contrast_sensitivity", "return_rmse_map", "k1", "k2", "gaussian_kernel", "sigma",
    "input_format", "aggregation_level", "spacing",
    "kernel_size", "use_cg_iter", "load_diag", "hp_filter", "return_all",
}  # fmt: skip
PACKAGES = (
    "classification", "regression", "nominal", "clustering", "audio", "image", "text", "shape",
    "multimodal", "segmentation",
)  # fmt: skip
# Keys that do not matter to a row, by function.
NOT_KEYS_OF = {
    "multiscale_structural_similarity_index_measure": {"normalize", "betas"},
    "precision_recall_curve": {"average"},
    "roc": {"average"},
}
# The axes of curves, at thresholds that a recipe gives: a row has no place for one of each sample.
CURVES = {"precision_recall_curve": ["precision", "recall"], "roc": ["fpr", "tpr"]}
# What torchmetrics takes as any text.
WORDS = {
    "reduction": ["mean", "sum"],
    "multioutput": ["raw_values", "uniform_average", "variance_weighted"],
}
# What torchmetrics does not say.
BETTER = {
    "adjusted_mutual_info_score": True, "adjusted_rand_score": True, "eer": False,
    "kendall_rank_corrcoef": True, "negative_predictive_value": True,
    "lip_vertex_error": False, "normalized_mutual_info_score": True,
    "pearson_corrcoef": True, "perplexity": False, "procrustes_disparity": False,
    "dice_score": True, "generalized_dice_score": True, "mean_iou": True, "squad": True,
    "precision_at_fixed_recall": True, "rand_score": True, "recall_at_fixed_precision": True,
    "sensitivity_at_specificity": True, "specificity": True, "specificity_at_sensitivity": True,
    "spectral_distortion_index": False,
    "tweedie_deviance_score": False,
}  # fmt: skip


def type_words(annotation: Any) -> tuple[list[str], list[str]] | None:
    """Return the types and the words that an argument takes, or None if a recipe has no such."""
    origin, args = get_origin(annotation), get_args(annotation)
    if annotation in (bool, int, float, str):
        return [annotation.__name__], []
    if annotation is type(None):
        return ["none"], []
    if origin is Literal:
        words = [word for word in args if isinstance(word, str)]
        return ["none"] * (None in args), words
    if origin is list and args in ((float,), (int,)):
        return [f"{args[0].__name__}s"], []
    if origin is tuple and args == (float, float):
        return ["pair"], []
    if origin in (Union, types.UnionType):
        found = [type_words(each) for each in args if each is not torch.Tensor]
        if all(found):
            return (
                list(dict.fromkeys(word for types_, _ in found for word in types_)),
                [word for _, words in found for word in words],
            )
    return None


def keys_of(function: Any, skipped: set[str]) -> dict[str, Any] | None:
    """Return the keys of a function, or None if it needs what no recipe can give."""
    hints, keys = get_type_hints(function), {}
    for name, parameter in list(inspect.signature(function).parameters.items())[2:]:
        is_required = parameter.default is inspect.Parameter.empty
        if name in NOT_KEYS | skipped:
            continue
        found = type_words(hints.get(name))
        if name in WORDS and (found is None or "str" in found[0]):
            found = [], WORDS[name]
        if name == "reduction" and found:  # a row has no place for a number of each sample
            found = [], [word for word in found[1] if word != "none"]
        if found is None:
            if is_required:
                return None
            continue
        types_, words = found
        key: dict[str, Any] = {"types": types_} if types_ else {}
        key |= {"words": words} if words else {}
        default = parameter.default
        if not is_required:
            key["default"] = list(default) if isinstance(default, tuple) else default
        keys[name] = key
    return keys


def camel(name: str) -> str:
    return name.replace("_", "").lower()


def higher_is_better(package: str, name: str) -> bool | None:
    """Return what the modular class of a function says."""
    classes = {
        camel(key): value
        for module in (torchmetrics, import_module(f"torchmetrics.{package}"))
        for key, value in vars(module).items()
        if inspect.isclass(value)
    }
    for prefix in ("", "binary", "multiclass", "multilabel"):
        found = getattr(classes.get(prefix + camel(name)), "higher_is_better", None)
        if isinstance(found, bool):
            return found
    return None


def result_of(function: Any, kind: str, keys: dict[str, Any]) -> Any:
    """Return the result of a call with as few arguments as possible, or None if it fails."""
    shape = (20, 3) if kind in ("multiclass", "multilabel") else (20,)
    scores = torch.rand(shape).softmax(-1) if kind == "multiclass" else torch.rand(shape)
    target = (torch.rand(20, 3)).argmax(-1) if kind == "multiclass" else (scores > 0.4).long()
    arguments = {key: 0.5 for key, value in keys.items() if "default" not in value}
    if "task" in inspect.signature(function).parameters:
        arguments["task"] = kind
    if kind in ("multiclass", "multilabel"):
        size = "num_classes" if kind == "multiclass" else "num_labels"
        arguments |= {size: 3}
    try:
        return function(scores, target, **arguments)
    except (ValueError, TypeError, RuntimeError, AttributeError):
        return None


def has_several(function: Any, kind: str, keys: dict[str, Any]) -> bool:
    """Return whether a function returns several numbers, whatever its keys are."""
    result = result_of(function, kind, keys)
    first = result[0] if isinstance(result, tuple) else result
    own = [
        key for key in ("average", "reduction") if kind in keys.get(key, {}).get("kinds", [kind])
    ]
    return first is not None and first.numel() > 1 and not {*own} & keys.keys()


def is_by_output(function: Any, keys: dict[str, Any]) -> bool:
    """Return whether samples of several numbers give a result for each of these numbers."""
    required = {key: 1.0 for key, value in keys.items() if "default" not in value}
    result = function(torch.rand(20, 3), torch.rand(20, 3), **required)
    return bool(result.numel() > 1)


def works_for_two_classes(function: Any) -> bool:
    labels = torch.tensor([0, 1, 1, 0, 1, 0])
    try:
        return bool(function(labels, labels.roll(1)).isfinite())
    except RuntimeError:
        return False


def takes_labels(function: Any, keys: dict[str, Any]) -> bool:
    """Return whether labels give the result that scores do, with one class counted per sample."""
    labels, target = torch.tensor([0, 2, 1, 1, 2, 0]), torch.tensor([0, 1, 1, 2, 2, 0])
    # As a rank's whole confidence: what looks at more than the best class differs.
    scores = torch.nn.functional.one_hot(labels, 3) * 0.4 + torch.rand(6, 3) * 0.3
    required = {key: 0.5 for key, value in keys.items() if "default" not in value}
    if "task" in inspect.signature(function).parameters:
        required |= {"task": "multiclass", "num_classes": 3}
    try:
        results = [function(preds, target, **required) for preds in (labels, scores)]
        return bool(torch.equal(*results))
    except (ValueError, TypeError, RuntimeError, AttributeError):
        return False


def entry(package: str, name: str) -> dict[str, Any] | None:
    """Return the row of a function, or None if no recipe can name it."""
    module = import_module(f"torchmetrics.functional.{package}")
    function = getattr(module, name)
    if tuple(inspect.signature(function).parameters)[:2] not in INPUTS:
        return None
    keys = keys_of(function, NOT_KEYS_OF.get(name, set()))
    if keys is None:
        return None
    kinds = ["regression"]
    if package == "text":
        kinds = ["answer"] if name == "squad" else ["multiclass"]
    if package == "segmentation":
        kinds = ["binary", "multiclass"]
        # Ours: torchmetrics has no word for pixels without a class.
        keys["ignore_index"] = {"types": ["int", "none"], "default": None}
    if package in ("nominal", "clustering"):
        kinds = ["binary"] * works_for_two_classes(function) + ["multiclass"]
    if package == "classification":
        kinds = [kind for kind in CLASS_KINDS if hasattr(module, f"{kind}_{name}")]
        if not kinds:
            kinds = [kind for kind in CLASS_KINDS if name.startswith(f"{kind}_")]
        for key, value in keys.items():
            own = [
                kind
                for kind in kinds
                if key in inspect.signature(getattr(module, f"{kind}_{name}", function)).parameters
            ]
            if own != kinds:
                value["kinds"] = own
    several = []
    if package == "classification" and name not in CURVES:
        several = [kind for kind in kinds if has_several(function, kind, keys)]
    several = kinds if name in ("stat_scores", *CURVES) else several
    if name in CURVES:
        keys["thresholds"] = {"types": ["int", "floats"]}
    labels = package in ("nominal", "clustering")
    labels = labels or (package == "classification" and takes_labels(function, keys))
    return {
        "package": package,
        "kinds": kinds,
        "higher_is_better": BETTER.get(name, higher_is_better(package, name)),
        **({"labels": True} if labels else {}),
        **({"several": several} if several else {}),
        **({"curve": CURVES[name]} if name in CURVES else {}),
        **({"by_output": True} if package == "regression" and is_by_output(function, keys) else {}),
        "keys": keys,
    }


def table() -> dict[str, Any]:
    """Return the table of all functions that a recipe can name."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    metrics: dict[str, Any] = {}
    for package in PACKAGES:
        names = import_module(f"torchmetrics.functional.{package}").__all__
        for name in sorted(set(names) - explain_unsupported(()).keys()):
            has_own = any(
                name.startswith(f"{kind}_") and name.removeprefix(f"{kind}_") in names
                for kind in CLASS_KINDS
            )
            row = None if has_own or name.startswith("binary_") else entry(package, name)
            if row:
                metrics[name] = row
    return {"version": torchmetrics.__version__, "metrics": dict(sorted(metrics.items()))}


def render() -> str:
    """Return the table as JSON with a metric on each line."""
    found = table()
    rows = ",\n".join(
        f" {json.dumps(name)}: {json.dumps(row)}" for name, row in found["metrics"].items()
    )
    return f'{{"version": {json.dumps(found["version"])}, "metrics": {{\n{rows}\n}}}}\n'


if __name__ == "__main__":
    PATH.write_text(render(), encoding="utf-8")
