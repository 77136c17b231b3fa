"""Which numbers are kept in fp32 when a run computes in bf16."""

import torch

from tests.known_bugs.catalogue import known_bug
from tests.known_bugs.ranks import on_ranks
from tests.known_bugs.runs import (
    assembled,
)
from trainer.engine.parallel import fsdp


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
