"""Tensor and sequence parallel: two ranks that share matrices find what one process finds."""

import re
from dataclasses import replace

import torch

from tests.known_bugs.catalogue import known_bug
from tests.known_bugs.ranks import alone, on_ranks
from tests.known_bugs.runs import (
    LATENT,
    assembled,
    assert_first_step_as_alone,
    assert_same_gradients,
    data_of,
    gradients_of,
)
from trainer.engine.data.batch import IGNORED
from trainer.engine.parallel.tensor import tensor as tensor_parallel
from trainer.engine.parallel.tensor.tensor import TensorParallel
from trainer.engine.train import update

TENSOR = {"tensor": 2, "shard": 1}
QWEN3 = {"name": "qwen3", "dim": 16, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 32}


def do_not_sum(pattern):
    """Return what leaves gradients of parameters on each rank as that rank's part finds them."""

    def put_in(patch):
        original = TensorParallel.split

        def split(self, *args):
            parts = original(self, *args)
            kept = {name for name in parts.tensor_replicated if not re.search(pattern, name)}
            assert kept < parts.tensor_replicated
            return replace(parts, tensor_replicated=kept)

        patch.setattr(TensorParallel, "split", split)

    return put_in


@known_bug(
    "NVIDIA/Megatron-LM#1446",
    "The final norm saw a part of the sequence on each tensor rank, and its gradients were not"
    " summed over the ranks.",
    do_not_sum(r"^head\.norm"),
    world=2,
)
def the_final_norm_sums_its_gradient_over_tensor_ranks():
    assert_first_step_as_alone(2, TENSOR)


@known_bug(
    "NVIDIA/Megatron-LM#7452",
    "A norm inside of attention was applied to each rank's own heads, and the two copies of its"
    " weight drifted apart because their gradients were not summed.",
    do_not_sum(r"[qk]_norm"),
    world=2,
)
def norms_of_heads_sum_their_gradients_over_tensor_ranks():
    assert_first_step_as_alone(2, TENSOR, model=QWEN3)


@known_bug(
    "pytorch/torchtitan#1373",
    "The rotated key that all heads share in latent attention got its gradient from the heads of"
    " one rank alone.",
    do_not_sum(r"kv_down"),
    world=2,
)
def the_key_that_heads_share_learns_from_the_heads_of_all_ranks():
    assert_first_step_as_alone(2, TENSOR, model=LATENT)


@known_bug(
    "pytorch/torchtitan#1805",
    "Weights of a mixture of experts were taken as local tensors, and their gradients from each"
    " rank's tokens were never put together.",
    do_not_sum(r"mlp\.shared"),
    world=2,
)
def shared_experts_learn_from_the_tokens_of_all_tensor_ranks():
    assert_first_step_as_alone(2, TENSOR, model=LATENT)


@known_bug(
    "pytorch/torchtitan#2416",
    "Each tensor rank routed its part of the tokens, and the router's weights differed between"
    " ranks after some steps.",
    do_not_sum(r"\.router\."),
    world=2,
)
def the_router_learns_from_the_tokens_of_all_tensor_ranks():
    assert_first_step_as_alone(2, TENSOR, model=LATENT)


ADAPTED = {"rank": 2, "targets": ["*.attention.[qkvo].weight", "*.mlp.*.weight"]}


@known_bug(
    "modelscope/mcore-bridge#173",
    "The half of an adapter that every tensor rank holds saw a part of the sequence on each of"
    " them, and one rank's copy was exported.",
    do_not_sum(r"\.lora_[ab]$"),
    world=2,
)
def halves_of_adapters_sum_their_gradients_over_tensor_ranks():
    changes = {"lora": ADAPTED}
    # B starts at zero, and then A has no gradient: compare after B has moved.
    found = on_ranks(2, second_step, {**changes, "parallel": TENSOR})
    for step in found:
        assert_same_gradients(step, alone(second_step, changes))


def second_step(changes):
    """Return the gradients of the second step."""
    parts = assembled(**changes)
    batches = parts.loader.steps(0)
    parts.step.accumulate(next(batches))
    parts.step.update(1.0)
    parts.step.clear()
    parts.step.accumulate(next(batches))
    return gradients_of(parts)


def take_whole_logits_for_a_part(patch):
    original = tensor_parallel._replace_by_gradient

    def replace_by_gradient(logits, labels, z_loss, first, group):
        losses, penalties = original(logits, labels, z_loss, first, group)
        return losses + (labels != IGNORED) * torch.tensor(group.size()).log(), penalties

    patch.setattr(tensor_parallel, "_replace_by_gradient", replace_by_gradient)


@known_bug(
    "NVIDIA/Megatron-LM#7452",
    "Logits that had been gathered were taken for one rank's part of the vocabulary, which added"
    " the logarithm of the tensor degree to the loss.",
    take_whole_logits_for_a_part,
    world=2,
)
def the_partition_function_of_a_split_vocabulary_counts_each_token_once():
    assert_first_step_as_alone(2, TENSOR)


def leave_vectors_out(patch):
    original = update.global_norm

    def global_norm(gradients, num_holders, device):
        matrices = [pair for pair in gradients if pair[0].ndim > 1]
        return original(matrices, num_holders, device)

    patch.setattr(update, "global_norm", global_norm)


@known_bug(
    "NVIDIA/Megatron-LM#7452",
    "Parameters without a mark of tensor parallelism, such as attention sinks, were left out of"
    " the gradient norm on all ranks but the first.",
    leave_vectors_out,
    world=2,
)
def the_norm_of_split_models_counts_every_parameter():
    assert_first_step_as_alone(2, TENSOR)


def keep_the_whole_gradient(patch):
    """Let every rank keep the whole gradient of an output that all of them compute."""
    patch.setitem(tensor_parallel.HOOKS, "repeated", lambda module, args, out, group: out)


@known_bug(
    "pytorch/torchtitan#2106",
    "A gradient that every rank already held whole was marked as a part, and summed over the"
    " ranks once more.",
    keep_the_whole_gradient,
    world=2,
)
def outputs_that_all_tensor_ranks_compute_count_once():
    rows = [{"text": "ab" * (1 + n % 5), "label": "yes" if n % 3 else "no"} for n in range(12)]
    task = {"name": "sequence_classification", "labels": ["no", "yes"]}
    assert_first_step_as_alone(2, TENSOR, task=task, data=data_of("answers", rows))


def leave_out_the_remainder(patch):
    patch.setattr(tensor_parallel, "rows_per_rank", lambda rows, ranks: rows // ranks)


@known_bug(
    "huggingface/transformers#37051",
    "A vocabulary that the tensor degree does not divide was cut into equal parts, and rows of the"
    " head were lost.",
    leave_out_the_remainder,
    world=2,
)
def a_vocabulary_of_odd_size_is_whole_on_tensor_ranks():
    assert_first_step_as_alone(2, TENSOR, model={"vocab_size": 323})
