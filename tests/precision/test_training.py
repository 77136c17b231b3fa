"""Training in narrow formats: near the run without, the same on ranks, and on after a stop."""

import json
from contextlib import ExitStack, nullcontext
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from tests.cases import also
from tests.distributed import run_ranks
from tests.train.moe_family import moe_recipe
from tests.train.plans import BASE, assembled, recipe_with, train
from tests.train.processes import newest
from trainer.engine.core.errors import RecipeError
from trainer.engine.launch.environment import World
from trainer.engine.run.library import load_recipe
from trainer.engine.run.run import run
from trainer.engine.train import step
from trainer.kernels.grouped_gemm_fp8 import op

STEPS = 3
ROOT = Path(__file__).parents[2]
MODEL = {"dim": 64, "n_layers": 1, "n_heads": 4, "n_kv_heads": 4, "ffn_dim": 64, "init_std": 0.1}
EXPERTS = {"dim": 128, "n_layers": 1, "init_std": 0.1}
ON = {"enabled": True, "emulate": True}
FORMATS = {
    "float8": {"compute": "fp32", "float8": ON},
    "mx": {"compute": "fp32", "mx": ON},
    "none": {"compute": "fp32"},
}
CASES = [("dense", "float8"), ("dense", "mx"), ("experts", "float8")]


def recipe(kind, word, parallel=(), **changes):
    changes |= {"precision": FORMATS[word], "parallel": dict(parallel)}
    changes["optimizer"] = {"name": "sgd", "lr": 0.1, "clip_norm": 0.5}
    rows = {"micro_batch": 4}
    if kind == "dense":
        return recipe_with(model=MODEL, data=BASE["data"] | rows, **changes)
    moe = {"expert_ffn_dim": 128, "num_experts": 4}
    return moe_recipe(moe, model=EXPERTS, data=rows, **changes)


def curves(recipes):
    """Return losses, and norms of gradients, of one run after another."""
    return [train(assembled(each), STEPS) for each in recipes]


@pytest.fixture(scope="module")
def alone():
    """What one process finds, in formats and without."""
    pytest.importorskip("torchao")
    cases = [*CASES, ("dense", "none"), ("experts", "none")]
    (found,) = run_ranks(1, curves, [recipe(*case) for case in cases], timeout=280)
    return dict(zip(cases, found, strict=True))


def assert_same(found, wanted, without):
    """Compare losses and norms with one process's, from which those without the format are far.

    Weights that were updated in another order of sums differ in their last bits. One of them may
    round to the next float8 value, which the norm of the gradient shows (7e-5), the loss does not.
    """
    (losses, norms), (expected, expected_norms) = found, wanted
    assert losses == pytest.approx(expected, abs=1e-5, rel=1e-5)
    assert norms[0] == pytest.approx(expected_norms[0], rel=1e-5)
    assert norms == pytest.approx(expected_norms, rel=3e-4)
    for theirs, others in zip(wanted, without, strict=True):
        distance = max(abs(a - b) for a, b in zip(theirs, others, strict=True))
        assert distance > 1e-3


def check(world, cases, alone):
    recipes = [recipe(kind, word, parallel) for kind, word, parallel in cases]
    for rank in run_ranks(world, curves, recipes, timeout=280):
        for (kind, word, _), found in zip(cases, rank, strict=True):
            assert_same(found, alone[kind, word], alone[kind, "none"])


def test_two_ranks_compute_what_one_process_does(alone):
    """Scales are of rows or parts of them, and powers of two: other ranks' values change none."""
    cases = [
        ("dense", "float8", {"shard": 2}),
        ("dense", "float8", {"tensor": 2}),
        ("experts", "float8", {"expert": 2}),
    ]
    check(2, cases, alone)


def quantised(recipes, is_kept):
    """Return, run after run, losses and norms, and how often weights of experts are quantised."""
    found = []
    for each in recipes:
        with ExitStack() as stack:
            quantise = stack.enter_context(patch.object(op, "quant_weight", wraps=op.quant_weight))
            if not is_kept:
                stack.enter_context(patch.object(step, "weights_unchanged", nullcontext))
            found.append((train(assembled(each), STEPS), quantise.call_count))
    return found


@pytest.mark.parametrize(
    ("world", "parallel", "changes"),
    [
        (2, {"expert": 2}, {}),
        *also(
            (1, {}, {"memory": {"recompute": "full"}}),
            (
                1,
                {},
                {
                    "optimizer": {"name": "sgd", "lr": 0.1},
                    "memory": {"optimizer_in_backward": True},
                },
            ),
            (2, {"shard": 2}, {"memory": {"recompute": "full"}}),
        ),
    ],
)
def test_experts_are_quantised_once_a_step_and_nothing_else_changes(world, parallel, changes):
    """With micro batches, recomputation, an update in the backward pass, and on ranks."""
    pytest.importorskip("torchao")
    one = expert_recipe(parallel, {"data": {"micro_batch": 2}} | changes)
    kept = run_ranks(world, quantised, [one], True, timeout=280)
    anew = run_ranks(world, quantised, [one], False, timeout=280)
    for ((found, count),), ((wanted, more),) in zip(kept, anew, strict=True):
        assert found == wanted, "bit for bit"
        if "shard" in parallel:  # gathered weights are not kept
            assert count == more
        else:
            assert count == 2 * STEPS
            assert more >= 4 * count


def expert_recipe(parallel, changes):
    moe = {"expert_ffn_dim": 128, "num_experts": 4}
    optimizer = {"optimizer": {"name": "sgd", "lr": 0.1, "clip_norm": 0.5}}
    changes = optimizer | {"precision": FORMATS["float8"], "parallel": parallel} | changes
    return moe_recipe(moe, model=EXPERTS, **changes)


PLANS = {
    "replicas": (2, {"replicate": 2, "shard": 1}),
    "context": (2, {"context": 2}),
    "tensor": (2, {"tensor": 2}),
    "hybrid": (4, {"replicate": 2, "shard": 2, "fsdp": {"strategy": "hybrid_shard"}}),
    "tensor-shard": (4, {"tensor": 2, "shard": 2}),
}


@pytest.mark.matrix
@pytest.mark.parametrize("plan", PLANS)
def test_a_plan_computes_what_one_process_does(plan, alone):
    world, parallel = PLANS[plan]
    check(world, [(*case, parallel) for case in CASES], alone)


@pytest.mark.matrix
@pytest.mark.parametrize("family", ["mistral", "qwen2", "olmo2", "phi3", "gemma2"])
def test_a_family_computes_on_tensor_ranks_what_it_does_on_one(family):
    pytest.importorskip("torchao")
    changes = {"model": {**MODEL, "name": family}, "optimizer": {"name": "sgd", "lr": 0.1}}
    changes["data"] = BASE["data"] | {"micro_batch": 4}
    words = [recipe_with(precision=FORMATS[word], **changes) for word in ("float8", "none")]
    ((wanted, without),) = run_ranks(1, curves, words, timeout=280)
    split = recipe_with(precision=FORMATS["float8"], parallel={"tensor": 2}, **changes)
    for (found,) in run_ranks(2, curves, [split], timeout=280):
        assert_same(found, wanted, without)


@pytest.mark.matrix
@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble"])
def test_a_pipeline_computes_what_one_process_does(schedule):
    pytest.importorskip("torchao")
    model = {"model": MODEL | {"n_layers": 4}}
    parallel = {"pipeline": 2, "pipelining": {"schedule": schedule}}
    base = {"optimizer": {"name": "sgd", "lr": 0.1}, "precision": FORMATS["float8"]} | model
    (wanted,) = run_ranks(1, curves, [recipe_with(**base)], timeout=280)
    for found in run_ranks(2, curves, [recipe_with(**base, parallel=parallel)], timeout=280):
        for ours, theirs in zip(found[0], wanted[0], strict=True):
            assert ours == pytest.approx(theirs, abs=1e-5, rel=1e-5)


@pytest.mark.parametrize(
    "changes",
    [
        {"memory": {"recompute": "full"}},
        pytest.param({"memory": {"recompute": "selective"}}, marks=pytest.mark.matrix),
        pytest.param(
            {"compile": {"enabled": True, "backend": "aot_eager"}}, marks=pytest.mark.matrix
        ),
    ],
    ids=["full", "selective", "compiled"],
)
def test_recomputed_and_compiled_blocks_compute_the_same(changes, alone):
    found = curves_here([recipe(kind, word, **changes) for kind, word in CASES])
    for case, each in zip(CASES, found, strict=True):
        assert_same(each, alone[case], alone[case[0], "none"])


@pytest.mark.parametrize(("recompute", "products"), [("none", 4), ("full", 6), ("selective", 4)])
def test_what_experts_multiplied_is_kept_where_products_are(recompute, products, monkeypatch):
    from trainer.engine.assemble.assemble import assemble
    from trainer.kernels.grouped_gemm_fp8 import reference

    only = {"targets": ["*.experts.*"], **ON}
    monkeypatch.setitem(FORMATS, "experts", {"compute": "fp32", "float8": only})
    made = recipe("experts", "experts", memory={"recompute": recompute})
    parts = assemble(made, World(), torch.device("cpu"))
    calls, multiply = [], reference.grouped_mm_fp8
    monkeypatch.setattr(
        reference, "grouped_mm_fp8", lambda *a, **k: calls.append(a) or multiply(*a, **k)
    )
    train(parts, 1)
    micro_batches = 2
    assert len(calls) == products * micro_batches


def curves_here(recipes):
    """Return the curves of one process, this one."""
    from trainer.engine.assemble.assemble import assemble

    cpu = torch.device("cpu")
    return [train(assemble(each, World(), cpu), STEPS) for each in recipes]


def debug_run(folder, precision, steps=10, allow_changed=()):
    """Run steps of the debug model, or the rest of them; return its losses by step."""
    settings = {
        "run.dir": str(folder),
        "run.steps": steps,
        "schedule.name": "constant",
        "schedule.warmup_steps": 5,
        "data.global_batch": 4,
        "data.micro_batch": 4,
        "data.seq_len": 64,
        "metrics.interval": 1,
        "evaluate.interval": 0,
        "checkpoint.interval": 0,
        "precision.compute": "bf16",
        **precision,
    }
    loaded = load_recipe(ROOT / "recipes/llama3_debug.toml", settings)
    run(loaded, World(), allow_changed=allow_changed)
    lines = (folder / "llama3-debug/metrics.jsonl").read_text().splitlines()
    return {row["step"]: row["loss"] for row in map(json.loads, lines)}


def state(folder):
    """Return the tensors of the newest checkpoint."""
    _, tensors = newest(folder / "llama3-debug")
    return tensors


@pytest.mark.parametrize("word", ["float8", pytest.param("mx", marks=pytest.mark.matrix)])
def test_a_run_stays_near_bf16_and_goes_on_bit_for_bit(word, tmp_path):
    pytest.importorskip("torchao")
    narrow = {f"precision.{word}.enabled": True, f"precision.{word}.emulate": True}
    usual = debug_run(tmp_path / "usual", {})
    whole = debug_run(tmp_path / "whole", narrow)
    distance = max(abs(whole[step] - usual[step]) for step in usual)
    assert len(usual) == 10
    assert 0 < distance < 5e-3
    debug_run(tmp_path / "parts", narrow, 6)
    assert debug_run(tmp_path / "parts", narrow) == whole
    straight, resumed, without = (state(tmp_path / each) for each in ("whole", "parts", "usual"))
    assert straight.keys() == resumed.keys() == without.keys()
    for name, tensor in straight.items():
        assert torch.equal(tensor, resumed[name]), name
        assert tensor.dtype == without[name].dtype, name

    with pytest.raises(RecipeError, match="differs from the checkpoint's in keys"):
        debug_run(tmp_path / "usual", narrow, 12)
    # A checkpoint of the one goes on as the other.
    onward = debug_run(tmp_path / "parts", {}, 12, ["precision"])
    assert onward.keys() == set(range(1, 13))
    assert onward[12] < onward[1]
