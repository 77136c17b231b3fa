"""Draws numbered combinations of model, task, plan, packing, recomputation and compilation.

A number always means the same cell, as long as this file and what recipes refuse stay the same.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

from pydantic import ValidationError

from trainer.engine.core.errors import RecipeError
from trainer.engine.parallel.mesh import AXES
from trainer.engine.recipe.checks.checks import check
from trainer.engine.recipe.schema import Recipe

CELLS = 2000
MOST_DRAWS, SAME_AXES = 5000, 100
ROW = 32
SCHEDULES = {
    "1F1B": 3,
    "GPipe": 1,
    "Interleaved1F1B": 2,
    "LoopedBFS": 1,
    "InterleavedZeroBubble": 1,
    "ZBVZeroBubble": 1,
    "DualPipeV": 1,
}
STRATEGIES = ("full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2")
LABELS = ["food", "sport", "weather"]


@dataclass(frozen=True)
class Cell:
    """A recipe, and the number of ranks of its plan."""

    number: int
    recipe: Recipe
    world: int
    values: dict[str, Any]

    def describe(self) -> str:
        """Return what tells the cell from others, in a line."""
        model, task = self.recipe.model.name, self.recipe.task.name
        degrees = self.recipe.parallel.degrees
        axes = [*AXES, "expert", "expert_tensor"]
        plan = " ".join(f"{axis}={n}" for axis in axes if (n := getattr(degrees, axis)) > 1)
        words = [self.recipe.data.packing, self.recipe.memory.recompute]
        words += ["compile"] * self.recipe.compile.enabled
        return f"{model} {task} {plan or 'one rank'} {' '.join(words)}"


@cache
def draw(number: int) -> Cell:
    """Return a cell; what the product refuses is drawn again."""
    generator = random.Random(f"cell {number}")
    for attempt in range(MOST_DRAWS):
        # A task and axes are kept for some attempts: else those that are often refused are rare.
        if attempt % SAME_AXES == 0:
            world = generator.choices([1, 2, 3, 4, 6, 8], [1, 12, 1, 14, 1, 8])[0]
            task, degrees = _draw_task(generator), _draw_degrees(generator, world)
        try:
            values = _draw_values(generator, *task, degrees)
            recipe = Recipe.model_validate(values)
            if not check(recipe, world):
                return Cell(number, recipe, world, values)
        except (ValidationError, RecipeError):
            continue
    raise AssertionError(f"cell {number}: nothing that was drawn is accepted")


def _draw_values(
    draw: random.Random,
    task: dict[str, Any],
    loss: dict[str, Any],
    packings: list[str],
    degrees: dict[str, int],
) -> dict[str, Any]:
    reads_records = task["name"] in RECORD_TASKS
    # Most time goes to the collectives of micro batches: few, but enough to fill a pipeline.
    micro, pieces = draw.choice([1, 1, 2, 4]), draw.choice([1, 2, 2, 3]) * degrees["pipeline"]
    data = {
        # Checked by the kind of the source: `adapt` makes the data.
        "sources": [{"name": "jsonl", "path": "x"} if reads_records else {"name": "synthetic"}],
        "seq_len": 2 * ROW if reads_records else ROW,
        "global_batch": micro * pieces * degrees["replicate"] * degrees["shard"],
        "micro_batch": micro,
        "packing": draw.choice(packings),
        "pad_to": draw.choice([0, 0, 8]),
    }
    values = {
        "run": {"steps": 2, "name": "cell"},
        "model": _draw_model(draw, bidirectional=task["name"] == "masked_language_modeling"),
        "task": task,
        "loss": loss,
        "data": data,
        "parallel": {**degrees, **_draw_plan(draw, degrees)},
        "memory": {"recompute": draw.choice(["none", "none", "full", "every_n", "selective"])},
    }
    # Each rank compiles for itself, which takes 7 CPU seconds.
    if prod(degrees.values()) <= 2 and draw.random() < 0.2:
        values["compile"] = {"enabled": True, "backend": "aot_eager"}
        if draw.random() < 0.2:
            values["memory"]["recompute"] = "budget"
    if draw.random() < 0.12:
        targets = draw.choice([["*.attention.*.weight"], ["*.attention.*.weight", "*.mlp.*"]])
        if "moe" in values["model"]:
            targets = [targets[0], *["*.experts.*"][: len(targets) - 1]]
        values["lora"] = {"rank": 4, "targets": targets}
    return values


RECORD_TASKS = (
    "sequence_classification",
    "token_classification",
    "question_answering",
    "preference",
    "reward",
)


def _draw_task(draw: random.Random) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """Return the tables of the task and of the loss, and the packings to choose from."""
    name = draw.choices(
        ["language_modeling", "masked_language_modeling", "distillation", *RECORD_TASKS],
        [10, 1, 2, 2, 1, 1, 3, 1],
    )[0]
    rows, records = ["concat", "documents", "documents", "none", "ragged"], ["none", "ragged"]
    if name == "language_modeling":
        z_loss = draw.choice([0.0, 0.0, 1e-3])
        return {"name": name}, {"name": "cross_entropy", "z_loss": z_loss}, rows
    if name == "masked_language_modeling":
        return {"name": name, "mask_rate": 0.3}, {}, rows
    if name == "distillation":
        loss = draw.choice(["forward_kl", "reverse_kl", "jensen_shannon"])
        table = {"name": name, "teacher": "random weights", "top_k": draw.choice([0, 0, 8])}
        return table, {"name": loss, "hard_weight": draw.choice([0.0, 0.3])}, rows
    if name == "preference":
        loss = draw.choice(["dpo", "ipo", "orpo", "simpo", "kto"])
        return {"name": name}, {"name": loss}, records
    table = {"name": name, "dropout": draw.choice([0.0, 0.0, 0.2])}
    if name == "sequence_classification":
        table |= draw.choice(
            [
                {"labels": LABELS},
                {"labels": LABELS, "problem": "multi"},
                {"problem": "regression", "targets": 2},
            ]
        )
    elif name == "token_classification":
        table["labels"] = LABELS
        return table, {"class_weights": [1.0, 3.0, 2.0]}, records
    return table, {}, records


def _draw_degrees(draw: random.Random, world: int) -> dict[str, int]:
    """Return a random way to divide the ranks over the axes."""
    degrees = dict.fromkeys(AXES, 1)
    left = world
    while left > 1:
        prime = next(n for n in (2, 3, 5, 7) if left % n == 0)
        degrees[draw.choice(AXES)] *= prime
        left //= prime
    return degrees


def _draw_plan(draw: random.Random, degrees: dict[str, int]) -> dict[str, Any]:
    """Return the keys of `[parallel]` beside the degrees of the mesh."""
    stage = prod(degrees.values()) // degrees["pipeline"]
    experts = {"expert": 1, "expert_tensor": 1}
    if draw.random() < 0.6:
        experts["expert"] = draw.choice([n for n in range(1, stage + 1) if stage % n == 0])
        rest = stage // experts["expert"]
        if draw.random() < 0.3:
            experts["expert_tensor"] = draw.choice([n for n in (1, 2) if rest % n == 0])
    schedule = draw.choices([*SCHEDULES], [*SCHEDULES.values()])[0]
    fsdp: dict[str, Any] = {
        "strategy": draw.choice(STRATEGIES),
        "offload": draw.random() < 0.05,
        "prefetch": draw.choice([0, 0, 2]),
        "reduce_every": draw.choice(["step", "step", "micro_batch"]),
        "reshard_after_forward": draw.choice([0, 0, 0, 2]),
        "ignored": draw.choice([[], [], ["*.norm.weight"]]),
    }
    rules = [
        [],
        [],
        [],
        [{"match": r"layers\.\d+\.mlp\.down\.weight", "place": {}}],
        [{"match": r"layers\.0\.mlp\.up\.weight", "place": {"shard": 1}}],
        [{"match": r"layers\.\d+\.attention\.o\.weight", "place": {"tensor": 0}}],
    ]
    return {
        **experts,
        "context_exchange": draw.choice(["gather", "ring"][: min(2, degrees["context"])]),
        "fsdp": fsdp,
        "pipelining": {"schedule": schedule, "stages_per_rank": draw.choice([0, 0, 0, 3])},
        "rules": draw.choice(rules),
    }


def _draw_experts(draw: random.Random, **fixed: Any) -> dict[str, Any]:
    """Return `model.moe` with any way to balance the load."""
    taken = draw.choice([1, 2, 2, 3])
    return {
        "num_experts": draw.choice([4, 6, 8]),
        "experts_per_token": taken,
        "expert_ffn_dim": draw.choice([16, 12]),
        "normalize": taken > 1,
        "aux_weight": draw.choice([0.0, 0.05]),
        "aux_scope": draw.choice(["sequence", "global"]),
        "z_weight": draw.choice([0.0, 1e-2]),
        "balance_bias": draw.random() < 0.3,
        "bias_rate": 0.01,
        **fixed,
    }


def _draw_model(draw: random.Random, *, bidirectional: bool) -> dict[str, Any]:
    """Return `[model]` of any family, small."""
    name = draw.choice(
        [
            *("llama3", "llama3", "qwen2", "qwen3", "qwen3", "mistral", "olmo2", "phi3"),
            *("mixtral", "gpt_oss", "llama4", "deepseek_v3", "deepseek_v3", "gemma2", "gemma3"),
        ]
    )
    groups = draw.choice([1, 2, 2, 4])
    model: dict[str, Any] = {
        "name": name,
        "dim": draw.choice([32, 48]),
        "n_layers": draw.choice([2, 3, 4, 5, 6, 8]),
        "n_heads": 4 if groups == 4 else draw.choice([2, 4]) * groups,
        "vocab_size": draw.choice([320, 321]),
        "tie_embeddings": draw.random() < 0.3,
    }
    if bidirectional:
        model["attention"] = "bidirectional"
    if name != "deepseek_v3":
        model |= {"n_kv_heads": groups, "head_dim": 8}
    if name not in ("mixtral", "gpt_oss"):
        model["ffn_dim"] = draw.choice([48, 96])
    return model | _draw_own(draw, name)


def _draw_own(draw: random.Random, name: str) -> dict[str, Any]:
    """Return the keys that a family alone has."""
    if name in ("mistral", "phi3"):
        window = {} if draw.random() < 0.5 else {"window": draw.choice([5, 12])}
        return window | ({"rotary_fraction": 0.5} if name == "phi3" else {})
    if name in ("gemma2", "gemma3"):
        table = {"window": draw.choice([5, 12]), "query_pre_attn_scalar": draw.choice([8, 12])}
        return table | {"full_every": draw.choice([2, 3]) if name == "gemma3" else 2}
    if name == "qwen3" and draw.random() < 0.7:
        return {"moe": _draw_experts(draw)}
    if name == "mixtral":
        return {"moe": _draw_experts(draw, normalize=True)}
    if name == "gpt_oss":
        return {"moe": _draw_experts(draw, normalize=True), "window": 7, "full_every": 2}
    if name == "llama4":
        experts = _draw_experts(draw)
        for key in ("normalize", "experts_per_token"):
            del experts[key]
        return {"moe": experts, "chunk": 8, "temperature_floor": 8, "nope_every": 2}
    if name == "deepseek_v3":
        grouped = {"groups": 2, "groups_per_token": 1} if draw.random() < 0.5 else {}
        return {
            "moe": _draw_experts(
                draw, num_shared=draw.choice([0, 1, 2]), score=draw.choice(["sigmoid", "softmax"])
            )
            | grouped,
            "n_dense_layers": draw.choice([0, 1]),
            "q_lora_rank": draw.choice([None, 16]),
            "kv_lora_rank": 16,
            "nope_head_dim": 8,
            "rope_head_dim": 4,
            "value_head_dim": 8,
            "mtp_depth": draw.choice([0, 0, 1]),
        }
    return {}
