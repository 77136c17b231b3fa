"""The average of the weights against a recursion in float64, under every data parallel plan."""

import os
import shutil

import numpy as np
import pytest
import torch

from tests.cases import quick
from tests.distributed import run_ranks
from tests.train.plans import recipe_with
from tests.train.processes import complaints, finish, rows, start, tensors, write_recipe
from trainer.engine.assemble.assemble import assemble
from trainer.engine.checkpoint.find import find_checkpoint
from trainer.engine.checkpoint.reader import load_state
from trainer.engine.checkpoint.state import model_state
from trainer.engine.launch.environment import World
from trainer.engine.recipe.checks.checks import check
from trainer.engine.train.evaluate import evaluate, validate

STEPS, DECAY, INTERVAL = 6, 0.8, 2


def full(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def follow(recipe, validating=True):
    """Train; return losses, validation losses, weights by step and the average by step."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    world = World(rank=rank, world_size=ranks, local_rank=rank, local_world_size=ranks)
    parts = assemble(recipe, world, torch.device("cpu"))
    losses, validation, weights, averages = [], [], [], []
    batches = parts.loader.steps(0)
    for step in range(1, STEPS + 1):
        gradients = parts.step.accumulate(next(batches))
        parts.step.update(1.0)
        parts.step.clear()
        parts.average.update(step)
        losses.append(gradients.loss.item())
        if validating and step % 3 == 0:
            validation.append(validate(parts)["loss"])
        state = model_state(parts.model)
        weights.append({name: full(tensor).numpy().copy() for name, tensor in state.items()})
        state = parts.average.state()
        averages.append({name: full(tensor).numpy().copy() for name, tensor in state.items()})
    return losses, validation, weights, averages


def validation_of(recipe, weights):
    """Return the validation loss of given weights, on one process."""
    parts = assemble(recipe, World(), torch.device("cpu"))
    with torch.no_grad():
        for name, parameter in parts.model.named_parameters():
            parameter.copy_(torch.from_numpy(weights[name]))
    task = parts.splits[0].task
    return evaluate(
        parts.parallel_model, lambda: parts.validation, task, parts.device, parts.degrees
    )["loss"]


PLANS = {
    "alone": (1, {}),
    "replicate-2": (2, {"replicate": 2, "shard": 1}),
    "shard-2": (2, {"shard": 2}),
    "offload-2": (2, {"fsdp": {"offload": True}}),
    "hybrid-2x2": (4, {"replicate": 2, "shard": 2, "fsdp": {"strategy": "hybrid_shard"}}),
}


@pytest.mark.parametrize("plan", quick(PLANS, "alone", "shard-2"))
def test_average_is_that_of_the_recursion_and_is_what_is_validated(plan):
    ranks, parallel = PLANS[plan]
    recipe = recipe_with(parallel=parallel, ema={"decay": DECAY, "interval": INTERVAL})
    results = run_ranks(ranks, follow, recipe, timeout=120)
    losses, validation, weights, averages = results[0]
    expected = {}
    for step, held in enumerate(weights, 1):
        if step % INTERVAL == 0:
            for name, weight in held.items():
                name, weight = name.replace("model.", "ema."), weight.astype(np.float64)
                before = expected.get(name, weight)
                expected[name] = DECAY * before + (1 - DECAY) * weight
        average = averages[step - 1]
        assert average.keys() == expected.keys()
        for name, value in expected.items():
            assert average[name].dtype == np.float32
            np.testing.assert_allclose(average[name], value, rtol=1e-6, atol=1e-7)
    alone = recipe_with()
    for step, loss in zip(range(3, STEPS + 1, 3), validation, strict=True):
        values = {name.removeprefix("ema."): value for name, value in averages[step - 1].items()}
        assert loss == pytest.approx(validation_of(alone, values), abs=1e-5)
    for other in results[1:]:
        assert other[:2] == results[0][:2]
    unvalidated = run_ranks(ranks, follow, recipe, False, timeout=120)[0]
    assert unvalidated[0] == losses, "validating the average left a trace in training"
    for name, weight in unvalidated[2][-1].items():
        assert np.array_equal(weight, weights[-1][name]), name


def test_average_is_saved_and_comes_back_bit_for_bit_on_other_numbers_of_ranks(tmp_path):
    recipe = write_recipe(tmp_path / "run", steps=6)
    settings = ["ema.decay=0.9", "schedule.name=constant"]
    assert finish(start(recipe, 2, overrides=settings)) == [0, 0]
    _, saved = tensors(tmp_path / "run")
    held = {name: tensor for name, tensor in saved.items() if name.startswith("ema.")}
    names = {name.removeprefix("model.") for name in saved if name.startswith("model.")}
    assert {name.removeprefix("ema.") for name in held} == names
    assert any(not torch.equal(held[f"ema.{name}"], saved[f"model.{name}"]) for name in names)
    settings += ["ema.interval=1000", "run.steps=9"]  # trains on, and leaves the average alone
    assert finish(start(recipe, 1, 1, settings, allow_changed=["ema"])) == [0]
    step, after = tensors(tmp_path / "run")
    assert step == 9
    for name, tensor in held.items():
        assert torch.equal(after[name], tensor), name


@pytest.mark.matrix
def test_a_resumed_average_goes_on_as_without_interruption(tmp_path):
    settings = [
        "ema.decay=0.9",
        "ema.interval=2",
        "schedule.name=constant",
        "schedule.warmup_steps=0",
    ]
    reference = write_recipe(tmp_path / "reference", steps=12)
    assert finish(start(reference, overrides=settings)) == [0]
    recipe = write_recipe(tmp_path / "parts", steps=12)
    for attempt, steps in enumerate((1, 5, 12)):  # at step 1 there is no average yet
        assert finish(start(recipe, 1, attempt, [*settings, f"run.steps={steps}"])) == [0]
    _, expected = tensors(tmp_path / "reference")
    _, state = tensors(tmp_path / "parts")
    assert state.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(state[name], tensor), name


def test_an_average_can_be_asked_for_later_and_begins_with_the_next_update(tmp_path):
    recipe = write_recipe(tmp_path / "run", steps=6)
    constant = "schedule.name=constant"
    assert finish(start(recipe, overrides=[constant])) == [0]
    later = [constant, "run.steps=8", "ema.decay=0.999", "ema.interval=8"]
    assert finish(start(recipe, overrides=later)) == [2]
    assert "ema.decay" in complaints(recipe)
    assert finish(start(recipe, overrides=later, allow_changed=["ema"])) == [0]
    _, state = tensors(tmp_path / "run")
    for name, tensor in state.items():
        if name.startswith("ema."):
            assert torch.equal(tensor, state[name.replace("ema.", "model.")]), name
    assert any(name.startswith("ema.") for name in state)


def poison_steps_7_and_8():
    from tests.train.test_lifecycle import poison

    poison(7, 8)


def test_a_rollback_takes_the_average_back_too(tmp_path):
    """Batches 6 and 7 are skipped by two rollbacks to step 6; the rest is one recursion."""
    recipe = write_recipe(tmp_path / "run", steps=9)
    rollback = ["ema.decay=0.9", "resilience.non_finite=rollback", "checkpoint.keep=9"]
    settings = [*rollback, "checkpoint.interval=1"]
    assert finish(start(recipe, before=poison_steps_7_and_8, overrides=settings)) == [0]
    assert [row["step"] for row in rows(tmp_path / "run")] == list(range(1, 10))
    average = None
    for step in range(1, 10):
        found = find_checkpoint(tmp_path / "run" / "run" / "checkpoints" / f"step-{step:08d}")
        state = {
            name: torch.empty(entry["shape"])
            for name, entry in found.manifest.tensors.items()
            if name.startswith(("ema.", "model."))
        }
        load_state(found.path, found.manifest, state, None)
        weights = {n[6:]: t.double() for n, t in state.items() if n.startswith("model.")}
        before = average or weights
        average = {name: 0.9 * before[name] + 0.1 * weight for name, weight in weights.items()}
        for name, value in average.items():
            torch.testing.assert_close(state[f"ema.{name}"].double(), value, rtol=1e-6, atol=1e-7)


TAIL = {"decay": DECAY, "last_steps": 3, "blend": 0.6}


def test_a_tail_average_is_blended_with_the_weights():
    recipe = recipe_with(run={"steps": STEPS, "seed": 3}, parallel={"shard": 2}, ema=TAIL)
    _, validation, weights, states = run_ranks(2, follow, recipe, timeout=120)[0]
    average = {}
    for step, held in enumerate(weights, 1):
        for name, weight in held.items():
            name, weight = name.removeprefix("model."), weight.astype(np.float64)
            if step == STEPS - 3:
                average[name] = weight
            elif step > STEPS - 3:
                average[name] = DECAY * average[name] + (1 - DECAY) * weight
        state = states[step - 1]
        assert len(state) == 2 * len(average)
        for name, value in average.items():
            assert state[f"average.{name}"] == pytest.approx(value, abs=1e-6)
            blended = 0.4 * held[f"model.{name}"] + 0.6 * value
            assert state[f"ema.{name}"] == pytest.approx(blended, abs=1e-6)
    last = {name.removeprefix("ema."): x for name, x in states[-1].items() if name[:4] == "ema."}
    (expected,) = run_ranks(1, validation_of, recipe_with(), last)
    assert validation[-1] == pytest.approx(expected, rel=1e-6)


def test_a_run_resumes_with_its_tail_average(tmp_path):
    recipe = write_recipe(tmp_path / "run", steps=6)
    settings = ["ema.decay=0.8", "ema.last_steps=3", "ema.blend=0.6"]
    settings += ["checkpoint.interval=5", "checkpoint.keep=2"]
    assert finish(start(recipe, overrides=settings)) == [0]
    _, through = tensors(tmp_path / "run")
    shutil.rmtree(tmp_path / "run/run/checkpoints/step-00000006")
    assert finish(start(recipe, 1, 1, settings)) == [0]
    step, resumed = tensors(tmp_path / "run")
    assert step == 6
    assert through.keys() == resumed.keys()
    assert any(name.startswith("average.") for name in through)
    for name, value in through.items():
        assert torch.equal(value, resumed[name]), name


def test_a_blend_without_an_average_is_refused():
    recipe = recipe_with(ema={"blend": 0.5})
    assert ("ema", "blend") in [path for path, _, _ in check(recipe)]
