"""Experts are balanced alike by one process, by accumulation, and by ranks under every plan."""

import math
from pathlib import Path

import pytest
import torch

from tests.cases import also, quick
from tests.distributed import run_ranks
from tests.model_zoo import moe_reference
from tests.train.moe_family import BALANCED, layers_of, moe_recipe, trained
from tests.train.plans import assembled, by_one_process
from trainer.engine.assemble.assemble import assemble
from trainer.engine.checkpoint.reader import load_weights
from trainer.engine.data.batch import SampleBatch
from trainer.engine.launch.environment import World
from trainer.engine.observe.metrics import read
from trainer.engine.parallel.mesh import Degrees
from trainer.engine.run.run import run
from trainer.engine.train.balance import Balance

PLANS = {
    "replicate-2": (2, {"replicate": 2, "shard": 1}),
    "shard-2": (2, {"shard": 2}),
    "hybrid-2x2": (4, {"replicate": 2, "shard": 2, "fsdp": {"strategy": "hybrid_shard"}}),
    "context-2": (2, {"context": 2}),
    "pipeline-2": (2, {"pipeline": 2}),
    "pipeline-2-shard-2": (4, {"pipeline": 2, "shard": 2}),
}
GLOBAL = {**BALANCED, "aux_scope": "global"}


@pytest.fixture(scope="module")
def alone():
    return by_one_process(trained, moe_recipe)


def assert_same(found, wanted):
    """Compare what ranks found with one process: of the buffers, every bit."""
    losses, norms, state, measures = wanted
    together = {}
    for rank in found:
        assert rank[0] == pytest.approx(losses, abs=1e-5, rel=1e-5)
        assert rank[1] == pytest.approx(norms, abs=1e-5, rel=1e-5)
        assert rank[3] == pytest.approx(measures, rel=1e-5)
        together |= rank[2]
    assert together.keys() == state.keys()
    for name, value in state.items():
        if name.endswith(("router.bias", "router.load")):
            assert (together[name] == value).all(), name
        else:
            assert together[name] == pytest.approx(value, abs=1e-5, rel=1e-5), name


@pytest.mark.parametrize("aux_scope", ["global", *also("sequence")])
@pytest.mark.parametrize("plan", quick(PLANS, "pipeline-2-shard-2"))
def test_a_plan_trains_experts_as_one_process_does(plan, aux_scope, alone):
    world, parallel = PLANS[plan]
    moe = {**BALANCED, "aux_scope": aux_scope}
    found = run_ranks(world, trained, moe_recipe(moe, parallel=parallel), timeout=240)
    assert_same(found, alone(moe=moe))


@pytest.mark.parametrize(
    ("schedule", "is_compiled"),
    [("ZBVZeroBubble", False), *also(("Interleaved1F1B", False), ("DualPipeV", True))],
)
def test_schedules_count_each_row_once(schedule, is_compiled, alone):
    parallel = {"pipeline": 2, "pipelining": {"schedule": schedule}}
    model, compiled = {"n_layers": 4}, {"enabled": is_compiled, "backend": "aot_eager"}
    recipe = moe_recipe(model=model, parallel=parallel, compile=compiled)
    assert_same(run_ranks(2, trained, recipe, timeout=240), alone(model=model))


@pytest.mark.parametrize("moe", [BALANCED, GLOBAL], ids=["sequence", "global"])
@pytest.mark.parametrize("micro_batch", [3, *also(8)])
def test_accumulation_changes_nothing(micro_batch, moe, alone):
    found = run_ranks(1, trained, moe_recipe(moe, data={"micro_batch": micro_batch}))
    assert_same(found, alone(moe=moe))


@pytest.mark.matrix
@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("plan", ["shard-2", None, "replicate-2"])
def test_recomputation_changes_nothing(plan, recompute, alone):
    world, parallel = PLANS[plan] if plan else (1, {})
    changed = moe_recipe(parallel=parallel, memory={"recompute": recompute})
    assert_same(run_ranks(world, trained, changed, timeout=240), alone())


@pytest.mark.parametrize("recompute", ["full", *also("none")])
@pytest.mark.parametrize("plan", ["shard-2", *also(None, "pipeline-2")])
@pytest.mark.matrix
def test_compiled_blocks_change_nothing(plan, recompute, alone):
    world, parallel = PLANS[plan] if plan else (1, {})
    compiled = {"enabled": True, "backend": "aot_eager"}
    changed = moe_recipe(parallel=parallel, memory={"recompute": recompute}, compile=compiled)
    assert_same(run_ranks(world, trained, changed, timeout=300), alone())


def test_updates_in_the_backward_pass_change_nothing(alone):
    changes = {
        "optimizer": {"name": "sgd", "lr": 0.3, "momentum": 0.9, "clip_norm": 0.0},
        "data": {"micro_batch": 8},
    }
    found = run_ranks(1, trained, moe_recipe(memory={"optimizer_in_backward": True}, **changes))
    assert_same(found, alone(**changes))


def test_biases_follow_the_signs_of_loads():
    for bias, expected in run_ranks(1, biases_and_signs)[0]:
        assert bias == pytest.approx(expected, abs=1e-7)
        assert len(set(bias)) > 1


def biases_and_signs():
    """Return each layer's biases, and what all choices of experts that it made say of them."""
    parts = assembled(moe_recipe())
    chosen = [[] for _ in layers_of(parts)]
    for layer, seen in zip(layers_of(parts), chosen, strict=True):
        layer.router.register_forward_hook(lambda *args, seen=seen: seen.append(args[2].chosen))
    expected = [[0.0] * 8 for _ in chosen]
    batches = parts.loader.steps(0)
    for _ in range(5):
        for seen in chosen:
            seen.clear()
        parts.step.accumulate(next(batches))
        for bias, seen in zip(expected, chosen, strict=True):
            every = torch.cat([each.flatten() for each in seen]).tolist()
            assert len(every) == 8 * 32 * 2
            mean = sum(e < 8 for e in every) / 8  # 8 is no expert: padding takes it
            assert mean < 64
            for e in range(8):
                bias[e] += 0.01 * ((every.count(e) < mean) - (every.count(e) > mean))
        parts.step.update(1.0)
        parts.step.clear()
    return [
        (layer.router.bias.tolist(), bias)
        for layer, bias in zip(layers_of(parts), expected, strict=True)
    ]


def test_measures_are_those_of_the_loads():
    (measures, loads, shares) = run_ranks(1, measured)[0]
    violations = [8 * max(row) / sum(row) - 1 for row in loads]
    assert measures["max_violation"] == pytest.approx(max(violations))
    assert measures["mean_violation"] == pytest.approx(sum(violations) / 2)
    assert measures["idle_experts"] == sum(row.count(0) for row in loads)
    entropy = sum(-(p * p.log()).sum(1).mean().item() for p in shares) / 2
    assert measures["router_entropy"] == pytest.approx(entropy, rel=1e-5)
    capacity = math.ceil(0.75 * sum(loads[0]) / 8)
    dropped = sum(max(0, rows - capacity) for row in loads for rows in row)
    assert measures["drop_rate"] == pytest.approx(dropped / sum(map(sum, loads)))


def measured():
    """Return a step's measures, each expert's rows, and tokens' scores."""
    recipe = moe_recipe({"capacity_factor": 0.75}, data={"micro_batch": 8})
    parts = assembled(recipe)
    loads, shares = [], []

    def note(router, args, out):
        rows = out.chosen.flatten().tolist()
        loads.append([rows.count(e) for e in range(8)])
        tokens = args[0].flatten(0, 1)[out.chosen[:, 0] < 8]
        shares.append((tokens @ router.weight.T).softmax(1).detach())

    for layer in layers_of(parts):
        layer.router.register_forward_hook(note)
    parts.step.accumulate(next(parts.loader.steps(0)))
    return (
        {name: value.item() for name, value in parts.step.balance.metrics().items()},
        loads,
        shares,
    )


@pytest.mark.parametrize(
    ("factor", "micro_batch", "warns"), [(1.5, 4, True), (1.5, 8, False), (None, 4, False)]
)
def test_capacity_in_parts_of_a_batch_is_warned_of(factor, micro_batch, warns, caplog):
    recipe = moe_recipe({"capacity_factor": factor}, data={"micro_batch": micro_batch})
    assemble(recipe, World(), torch.device("cpu"))
    assert ("capacity_factor counts tokens in each micro batch" in caplog.text) == warns


def test_biases_make_loads_even():
    model, x, found = torch.nn.Module(), moe_reference.tokens(batch=16, length=64), []
    model.mlp, model.remote_parameters = moe_reference.layer(balance_bias=True, bias_rate=5e-3), {}
    balance = Balance(model, Degrees(), device=x.device)
    batch = SampleBatch({"x": x})
    for _ in range(200):
        balance.start(1.0, [batch])
        model.mlp(x).sum().backward()
        balance.collect(lambda counts: None)
        balance.update()
        found.append(balance.metrics()["mean_violation"].item())
    assert found[0] > 0.4
    assert all(violation < 0.1 for violation in found[-10:])


def test_a_resumed_run_goes_on_with_its_biases(tmp_path):
    whole, parts = run_ranks(1, interrupted, str(tmp_path), timeout=120)[0]
    assert len(whole[0]) == 8
    assert parts[0] == whole[0]
    for name, buffer in whole[1].items():
        assert buffer.any()
        assert (parts[1][name] == buffer).all(), name


def interrupted(folder):
    """Return rows and saved buffers of a run, and of one that was ended and goes on."""
    found = []
    for name, lengths in (("whole", [8]), ("parts", [4, 8])):
        for steps in lengths:
            recipe = moe_recipe(
                GLOBAL,
                run={"steps": steps, "seed": 3, "dir": folder, "name": name},
                metrics={"interval": 1},
                checkpoint={"mode": "sync"},
            )
            assert run(recipe, World(rank=0, world_size=1, local_rank=0, local_world_size=1)) == 0
        place = Path(folder) / name
        keys = ("step", "loss", "grad_norm", "max_violation", "router_entropy")
        rows = [row for row in read(place / "metrics.jsonl") if row["kind"] == "train"]
        model = assembled(recipe).model
        load_weights(place, model)
        buffers = {name: buffer.numpy() for name, buffer in model.saved_buffers().items()}
        found.append(([[row[key] for key in keys] for row in rows], buffers))
    return found
