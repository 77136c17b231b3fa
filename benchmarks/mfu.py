"""MFU of two recipes on H100s: by the clock of `trainer plan`, and kernel by kernel.

The second is arithmetic, no measurement: each kernel's work over the rate that is published or
modelled for kernels of its shape, everything else as bytes over the memory's bandwidth. It says
what the implementations allow where nothing else is lost; the clock says what published engines
reach.

    python benchmarks/mfu.py --write
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import results

from trainer.engine.estimate.devices import DEVICES
from trainer.engine.estimate.speed import estimate_speed
from trainer.engine.estimate.step_sizes import StepSizes
from trainer.engine.estimate.work import recomputed_share
from trainer.engine.recipe.load import load_recipe
from trainer.engine.recipe.schema import Recipe

RECIPES = Path(__file__).parents[1] / "recipes"
CASES = (("llama3_8b", 8), ("llama3_8b", 64), ("moe_1b", 8), ("moe_1b", 64))
CUBLAS = 788e12
"""FLOPs per second of the largest bf16 products of an H100 SXM"""
PRODUCTS = 0.8 * CUBLAS
ATTENTION = 335e12
"""both passes of FlashAttention-2 on an H100 (arXiv:2307.08691, section 4.1)"""
UP, DOWN, UP_INPUT, DOWN_INPUT, WEIGHT = 578e12, 456e12, 533e12, 587e12, 490e12
"""grouped products for 64 experts of width 512, dim 2048 and 16,384 tokens with 8 experts each,
modelled from tile times: the forward pass of gate and up together and of down, the gradients of
their inputs, and of the weights"""
BANDWIDTH = 0.82 * DEVICES["h100"].memory_bandwidth
"""kernels that only read and write reach 75 to 88 %"""
LOSS_ROWS = 4096
GAPS = 0.03
"""share of a step in which no kernel runs"""
WORD, WIDE = 2, 4


def count_moved(recipe: Recipe, sizes: StepSizes) -> float:
    """Return the bytes that a token's fused elementwise operations move in a step.

    In a forward pass: two norms with the sums before them, rotary embeddings, and SwiGLU; of
    experts also the rows that permute and unpermute read and write.
    """
    config = sizes.config
    heads = config.n_heads + config.n_kv_heads
    forward = 6 * config.dim + 2 * heads * config.head_width
    if moe := sizes.moe:
        taken = moe.experts_per_token
        forward += (3 * taken + 1) * config.dim + 3 * taken * moe.expert_ffn_dim
    else:
        forward += 3 * config.ffn_dim
    # A backward pass reads and writes about twice as much.
    passes = 3 + (recipe.memory.recompute != "none")
    return WORD * passes * forward * config.num_blocks


def seconds_of(recipe: Recipe, sizes: StepSizes) -> dict[str, float]:
    """Return the seconds of a token on one GPU, by kind of work."""
    config = sizes.config
    again, attention_again = recomputed_share(recipe.memory)
    vocab = config.vocab
    parts = {
        "dense products": 2 * (3 + again) * sizes.dense / PRODUCTS,
        "head": 6 * sizes.head / PRODUCTS,
        # Logits are read twice and written once; each chunk adds to the gradient of the weight.
        "loss": (3 * WORD * vocab + 2 * WIDE * vocab * config.dim / LOSS_ROWS) / BANDWIDTH,
        "attention": 2 * (3 + attention_again) * sizes.attention / ATTENTION,
        "elementwise": count_moved(recipe, sizes) / BANDWIDTH,
    }
    if sizes.routed:
        up, down = 2 / 3 * sizes.routed, 1 / 3 * sizes.routed
        forward = up / UP + down / DOWN
        backward = up / UP_INPUT + down / DOWN_INPUT + sizes.routed / WEIGHT
        parts["experts"] = 2 * ((1 + again) * forward + backward)
    return parts


def compare(name: str, ranks: int) -> dict[str, Any]:
    """Return both MFUs of a recipe, and the microseconds of a token."""
    recipe = load_recipe(RECIPES / f"{name}.toml", [], ranks).recipe
    sizes, speed = StepSizes.of(recipe), estimate_speed(recipe, ranks, "h100", 8)
    assert speed
    parts = seconds_of(recipe, sizes)
    tokens = recipe.data.global_batch * recipe.data.seq_len / ranks
    rest = ("communication that computation does not hide", "pipeline bubble", "the optimizer")
    parts["communication and optimizer"] = sum(speed.step_parts[each] for each in rest) / tokens
    parts["gaps"] = GAPS * sum(parts.values())
    flops = 6 * (sizes.dense + sizes.routed + sizes.head + sizes.attention)
    return {
        "recipe": name,
        "gpus": ranks,
        "plan": round(speed.mfu, 3),
        "by_kernels": round(flops / sum(parts.values()) / DEVICES["h100"].flops, 3),
        "microseconds_of_a_token": {key: round(1e6 * value, 2) for key, value in parts.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help=f"append to {results.FOLDER.name}/")
    options = parser.parse_args()
    found = [compare(name, ranks) for name, ranks in CASES]
    lines = [
        [f"{each['recipe']} on {each['gpus']}", f"{each['plan']:.1%}", f"{each['by_kernels']:.1%}"]
        for each in found
    ]
    print(results.table(["MFU", "plan", "kernel by kernel"], lines), "\n")
    print(json.dumps(found, indent=1))
    if options.write:
        print(f"written to {results.append('mfu', {'rows': found}).name}")


if __name__ == "__main__":
    main()
