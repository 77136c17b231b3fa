"""A checkpoint written under one plan resumes under any other."""

import shutil
from typing import NamedTuple

import pytest
import torch

from tests.train.processes import (
    EXPERTS,
    MODEL,
    complaints,
    finish,
    rows,
    start,
    tensors,
    write_recipe,
)

SETTINGS = [
    "schedule.name=constant",
    "precision.compute=fp32",
    "optimizer.lr=1e-3",
    "optimizer.eps=1e-4",  # AdamW divides by little at first: rounding would be all that is seen
    "schedule.warmup_steps=0",
    "model.n_layers=4",
    "evaluate.interval=0",
]
HYBRID = {"replicate": 2, "fsdp.strategy": "hybrid_shard"}
HALF, STEPS = 3, 6


class Family(NamedTuple):
    """A model, and plans that it trains under: ranks and `[parallel]`."""

    model: str
    plans: dict[str, tuple[int, dict[str, int | str]]]
    quick: tuple[str, ...] = ()


DENSE = Family(
    MODEL,
    {
        "alone": (1, {}),
        "shard-2": (2, {"shard": 2}),
        "tensor-4": (4, {"tensor": 4}),
        "pipeline-2-tensor-2": (4, {"pipeline": 2, "tensor": 2}),
        "interleaved-2-context-2": (
            4,
            {"pipeline": 2, "context": 2, "pipelining.schedule": "Interleaved1F1B"},
        ),
        "shard-2-context-2-tensor-2": (8, {"shard": 2, "context": 2, "tensor": 2}),
    },
)
MIXED = Family(
    EXPERTS,
    {
        "alone": (1, {}),
        "shard-2": (2, {"shard": 2}),
        "expert-2": (2, {"expert": 2}),
        "expert-2-shard-4": (4, {"expert": 2}),
        "expert-4-shard-8": (8, {"expert": 4}),
        "expert-2-hybrid": (4, {"expert": 2, **HYBRID}),
        "expert-2-tensor-2": (4, {"expert": 2, "tensor": 2}),
        "expert-4-tensor-2": (4, {"expert": 4, "tensor": 2}),
        "divided-2-tensor-2": (4, {"expert_tensor": 2, "tensor": 2}),
        "expert-2-context-2": (2, {"expert": 2, "context": 2}),
        "expert-2-pipeline-2": (4, {"expert": 2, "pipeline": 2}),
    },
    ("alone", "expert-2-shard-4"),
)
SINKS = Family(
    """
[model]
name = "gpt_oss"
dim = 32
n_heads = 6
n_kv_heads = 2
head_dim = 8
window = 20
moe = { num_experts = 4, expert_ffn_dim = 16 }
""",
    # Two ranks share the sinks of three heads, of six in all.
    {"alone": (1, {}), "tensor-2-shard-2": (4, {"tensor": 2, "shard": 2})},
)
FAMILIES = {"dense": DENSE, "experts": MIXED, "sinks": SINKS}


def train(recipe, parallel, attempt, steps):
    world, degrees = parallel
    settings = [*SETTINGS, f"run.steps={steps}"]
    settings += [f"parallel.{key}={value}" for key, value in degrees.items()]
    assert finish(start(recipe, world, attempt, settings), 300) == [0] * world, complaints(recipe)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Return a function from the name of a family to the folder of one process's run."""
    found = {}

    def run(name):
        if name not in found:
            found[name] = tmp_path_factory.mktemp("undisturbed") / "run"
            family = FAMILIES[name]
            recipe = write_recipe(found[name], STEPS, family.model)
            train(recipe, family.plans["alone"], 0, STEPS)
        return found[name]

    return run


def cases(quick):
    """Return families and plans that save, each with those that then resume."""
    return [
        pytest.param(name, first, sorted(others), id=f"{name}-{first}")
        for name, family in FAMILIES.items()
        for first in family.plans
        for soon in [set(family.quick) - {first} if first in family.quick else set()]
        if (others := soon if quick else set(family.plans) - soon - {first})
    ]


@pytest.mark.parametrize(("name", "first", "others"), cases(quick=True))
def test_it_resumes_under_others(name, first, others, undisturbed, tmp_path):
    resume(FAMILIES[name], first, others, undisturbed(name), tmp_path)


@pytest.mark.matrix
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("name", "first", "others"), cases(quick=False))
def test_it_resumes_under_every_other_plan(name, first, others, undisturbed, tmp_path):
    resume(FAMILIES[name], first, others, undisturbed(name), tmp_path)


def resume(family, first, others, undisturbed, tmp_path):
    saved = write_recipe(tmp_path / "saved", STEPS, family.model)
    train(saved, family.plans[first], 0, HALF)
    expected = [row["loss"] for row in rows(undisturbed)]
    _, final = tensors(undisturbed)
    for then in others:
        folder = tmp_path / then
        recipe = write_recipe(folder, STEPS, family.model)
        shutil.copytree(tmp_path / "saved" / "run", folder / "run")
        train(recipe, family.plans[then], 1, STEPS)
        losses = [row["loss"] for row in rows(folder)]
        assert losses == pytest.approx(expected, abs=1e-5), then
        step, found = tensors(folder)
        assert step == STEPS
        for name, tensor in final.items():
            if name.startswith(("model.", "optimizer.")):
                torch.testing.assert_close(found[name], tensor, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "plan",
    [
        "expert-2",
        *(
            pytest.param(plan, marks=pytest.mark.matrix)
            for plan in ("expert-2-shard-4", "expert-2-hybrid", "expert-2-pipeline-2")
        ),
    ],
)
def test_the_same_plan_goes_on_bit_for_bit(plan, tmp_path):
    finals = []
    for name, lengths in (("whole", [STEPS]), ("parts", [HALF, STEPS])):
        recipe = write_recipe(tmp_path / name, STEPS, MIXED.model)
        for attempt, steps in enumerate(lengths):
            train(recipe, MIXED.plans[plan], attempt, steps)
        finals.append((rows(tmp_path / name), tensors(tmp_path / name)))
    (whole_rows, (_, whole)), (parts_rows, (_, parts)) = finals
    measured = ("loss", "grad_norm", "max_violation")
    for expected, found in zip(whole_rows, parts_rows, strict=True):
        assert [found[key] for key in measured] == [expected[key] for key in measured]
    assert whole.keys() == parts.keys()
    for name, tensor in whole.items():
        assert torch.equal(parts[name], tensor), name
