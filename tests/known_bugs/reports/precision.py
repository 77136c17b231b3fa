"""Which numbers are kept in fp32 when a run computes in bf16."""

import torch

from tests.known_bugs.catalogue import known_bug
from tests.known_bugs.ranks import on_ranks
from tests.known_bugs.runs import assembled, assert_equal, enlarge, gradients_of
from trainer.engine.parallel import fsdp
from trainer.engine.parallel.tensor import tensor as tensor_parallel
from trainer.engine.train import update
from trainer.kernels.cross_entropy import reference


def dtypes_in_blocks(changes):
    """Return the dtypes of floating inputs of the first block, and of weights and their state."""
    parts = assembled(**changes)
    seen = []

    def look(_module, inputs):
        seen.extend(str(x.dtype) for x in inputs if torch.is_tensor(x) and x.is_floating_point())

    block = parts.model_config.layout.find_blocks(parts.model)[0]
    block.attention.register_forward_pre_hook(look)
    parts.step.accumulate(next(parts.loader.steps(0)))
    return {"inputs": seen[:3], "weights": {str(w.dtype) for w in parts.model.parameters()}}


def cast_what_blocks_take(patch):
    original = fsdp.MixedPrecisionPolicy

    def policy(**options):
        return original(**{**options, "cast_forward_inputs": True})

    patch.setattr(fsdp, "MixedPrecisionPolicy", policy)


@known_bug(
    "pytorch/torchtitan#2881",
    "FSDP cast every input of a block to bf16, the table of rotary angles too, which needs fp32"
    " at far positions.",
    cast_what_blocks_take,
    world=2,
)
def rotary_tables_stay_in_fp32_under_bf16():
    changes = {"parallel": {"shard": 2}, "precision": {"compute": "bf16"}}
    for found in on_ranks(2, dtypes_in_blocks, changes):
        assert found["inputs"] == ["torch.bfloat16", "torch.float32", "torch.float32"]


def keep_weights_in_bf16(patch):
    original = fsdp.apply_fsdp

    def apply(model, *args, **options):
        original(model.to(torch.bfloat16), *args, **options)

    patch.setattr(fsdp, "apply_fsdp", apply)


@known_bug(
    "huggingface/accelerate#3979",
    "The cast of the trained weights to fp32 had become a call without effect, so that bf16"
    " weights lost small updates.",
    keep_weights_in_bf16,
    world=2,
)
def weights_are_kept_in_fp32_under_bf16():
    changes = {"parallel": {"shard": 2}, "precision": {"compute": "bf16"}}
    for found in on_ranks(2, dtypes_in_blocks, changes):
        assert found["weights"] == {"torch.float32"}


def gradients_in_bf16(changes):
    """Return the gradients of a step in bf16 that could be numbers in bf16 themselves."""
    parts = assembled(**changes, precision={"compute": "bf16"})
    enlarge(parts.model)
    parts.step.accumulate(next(parts.loader.steps(0)))
    gradients = {name: torch.from_numpy(g) for name, g in gradients_of(parts).items()}
    return {name for name, g in gradients.items() if (g == g.bfloat16()).all()}


def sum_in_bf16(patch):
    original = tensor_parallel.make_replicated_reduction

    def make(parameters, *args):
        reduce = original(parameters, *args)

        def reduce_rounded():
            reduce()
            for each in parameters:
                each.grad.copy_(each.grad.bfloat16())

        return reduce_rounded

    patch.setattr(tensor_parallel, "make_replicated_reduction", make)


@known_bug(
    "pytorch/pytorch#190627",
    "The dtype of reductions was that of FSDP's alone, while gradients of norms were summed over"
    " tensor ranks in bf16.",
    sum_in_bf16,
    world=2,
)
def sums_over_tensor_ranks_are_in_fp32_under_bf16():
    for found in on_ranks(2, gradients_in_bf16, {"parallel": {"tensor": 2, "shard": 1}}):
        assert not {name for name in found if "norm" in name}


def reduce_in_the_dtype_of_products(patch):
    original = fsdp.MixedPrecisionPolicy

    def policy(**options):
        return original(**{**options, "reduce_dtype": options.get("param_dtype")})

    patch.setattr(fsdp, "MixedPrecisionPolicy", policy)


@known_bug(
    "hiyouga/LlamaFactory#9769",
    "Gradients were reduced and accumulated in the dtype of the products, and small ones were lost"
    " in the sums over many micro batches.",
    reduce_in_the_dtype_of_products,
    world=2,
)
def gradients_are_accumulated_in_fp32_under_bf16():
    for found in on_ranks(2, gradients_in_bf16, {"parallel": {"shard": 2}}):
        assert not found


def norm_in_bf16(patch):
    original = update.global_norm

    def global_norm(gradients, *args):
        rounded = [(gradient, part.bfloat16()) for gradient, part in gradients]
        return original(rounded, *args).bfloat16().float()

    patch.setattr(update, "global_norm", global_norm)


@known_bug(
    "pytorch/torchtitan#4135",
    "The gradient norm was computed in bf16, and its rounding depended on how parameters were"
    " divided over ranks.",
    norm_in_bf16,
)
def the_norm_is_computed_in_fp32_under_bf16():
    parts = assembled(precision={"compute": "bf16"})
    found = parts.step.accumulate(next(parts.loader.steps(0))).norm
    expected = sum((gradient**2).sum() for gradient in gradients_of(parts).values()) ** 0.5
    assert_equal(found, expected)


def keep_the_dtype_of_logits(patch):
    def replace_by_gradient(logits, labels, z_loss):
        losses = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
        return losses.float(), torch.zeros_like(losses)

    patch.setattr(reference, "replace_by_gradient", replace_by_gradient)


@known_bug(
    "Modalities/modalities#464",
    "The cross entropy of bf16 logits was computed in bf16, whose steps are a quarter where the"
    " loss is large.",
    keep_the_dtype_of_logits,
)
def the_loss_of_bf16_logits_is_computed_in_fp32():
    logits = (torch.randn(6, 20, generator=torch.Generator().manual_seed(0)) * 9).bfloat16()
    labels = torch.arange(6)
    expected = torch.nn.functional.cross_entropy(logits.double(), labels, reduction="none")
    assert_equal(reference.replace_by_gradient(logits, labels, 0.0)[0], expected)
