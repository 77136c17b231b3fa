"""Makes docs/support.md: what goes with what, as the checks of recipes say.

python -m tests.docs.support
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import trainer
from trainer.engine.core.errors import RecipeError
from trainer.engine.recipe.documents.pages import markdown_table
from trainer.engine.recipe.load import Origin, Tree, load_tree
from trainer.engine.recipe.schema import REGISTRIES

PAGE = Path(trainer.__file__).resolve().parent / "docs" / "support.md"
BASE = [
    "run.steps=10",
    "schedule.warmup_steps=1",
    "data.seq_len=256",
    "data.global_batch=64",
    "data.micro_batch=1",
    'data.sources=[{name="python"}]',
    'tokenizer.name="bytes"',
]
AXES = {
    "one rank": (1, []),
    "DDP": (2, ["parallel.replicate=2"]),
    "FSDP": (2, ["parallel.shard=2"]),
    "HSDP": (4, ["parallel.replicate=2", "parallel.shard=2"]),
    "tensor": (2, ["parallel.tensor=2"]),
    "context": (2, ["parallel.context=2"]),
    "pipeline": (2, ["parallel.pipeline=2"]),
    "zero-bubble": (2, ["parallel.pipeline=2", 'parallel.pipelining.schedule="ZBVZeroBubble"']),
    "all four": (16, [f"parallel.{axis}=2" for axis in ("shard", "tensor", "context", "pipeline")]),
    "expert": (2, ["parallel.shard=2", "parallel.expert=2"]),
    "expert, tensor": (4, ["parallel.shard=2", "parallel.tensor=2", "parallel.expert=2"]),
}
LABELS = 'task={name="sequence_classification", labels=["a", "b"]}'
FILE = 'data.sources=[{name="jsonl", path="data.jsonl"}]'
FEATURES = {
    "alone": [],
    "compile": ["compile.enabled=true"],
    "recompute: full": ['memory.recompute="full"'],
    "recompute: selective": ['memory.recompute="selective"'],
    "recompute: budget": ['memory.recompute="budget"', "compile.enabled=true"],
    "documents": ['data.packing="documents"'],
    "LoRA": ["lora.rank=4"],
    "float8": ['precision.float8={recipe="rowwise"}', 'precision.compute="bf16"'],
    "EMA": ["ema.decay=0.99"],
    "classification": [LABELS, FILE],
    "classification, ragged": [LABELS, FILE, 'data.packing="ragged"'],
    "preference": ['task.name="preference"', FILE],
}
NO_EXPERTS = "has no experts that ranks could share"
INTRODUCTION = """# What goes with what

<!-- Made by `python -m tests.docs.support`. Change the checks of recipes, not this page. -->

Each cell is a recipe of a model's debug flavor, checked as `trainer validate` does: yes, or the
number of the reason for which it is refused; a dash where a model has no experts to share. Tests
under `tests/train`, `tests/model_zoo` and `tests/lora` compare losses and gradients of plans with
those of one process. "Zero-bubble" is a pipeline by `ZBVZeroBubble`; "all four" are FSDP, tensor,
context and pipeline parallelism on 16 ranks."""


def find_refusal(world: int, *keys: str) -> str:
    """Return the first reason why a recipe is refused; empty: it is not."""
    try:
        load_tree(Tree(origins={(): Origin("")}), Path(), [*BASE, *keys], world)
    except RecipeError as error:
        problem = error.problems[0]
        return f"`{problem.key}`: {problem.message}" if problem.key else problem.message
    return ""


def list_models() -> dict[str, list[str]]:
    """Return the keys of each family's smallest flavor, by what the page calls it."""
    named = {name: [f'model.name="{name}"', 'model.flavor="debug"'] for name in REGISTRIES["model"]}
    named["qwen3, experts"] = ['model.name="qwen3"', 'model.flavor="moe_debug"']
    named["deepseek_v3, mtp_depth = 1"] = [*named["deepseek_v3"], "model.mtp_depth=1"]
    return dict(sorted(named.items()))


def make_page() -> str:
    """Return the page's text."""
    reasons: dict[str, int] = {}

    def cell(world: int, *keys: str) -> str:
        reason = find_refusal(world, *keys)
        if not reason or NO_EXPERTS in reason:
            return "-" if reason else "yes"
        return f"({reasons.setdefault(reason, len(reasons) + 1)})"

    def table(rows: Mapping[str, Sequence[str]]) -> str:
        """Return the table of rows of keys and all axes."""
        cells = (
            [title, *(cell(world, *keys, *more) for world, more in AXES.values())]
            for title, keys in rows.items()
        )
        return markdown_table(["", *AXES], cells)

    models = list_models()
    parts = [INTRODUCTION, "## Models and plans", table(models)]
    features = (
        [title, *(cell(1, *keys, *more) for more in FEATURES.values())]
        for title, keys in models.items()
    )
    parts += ["## Models and features, on one rank", markdown_table(["", *FEATURES], features)]
    for name, words in (("llama3", "a dense model"), ("mixtral", "a mixture of experts")):
        parts.append(f"## Features and plans of {words} ({name})")
        parts.append(table({each: [*models[name], *FEATURES[each]] for each in FEATURES}))
    parts += ["## Reasons", "\n".join(f"{number}. {text}" for text, number in reasons.items())]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(make_page())
