"""A step that is skipped on the device changes nothing, as one that the host skips."""

import math
from copy import deepcopy
from dataclasses import asdict

import pytest
import torch

from tests.distributed import run_ranks
from tests.train.moe_family import BALANCED, moe_recipe
from tests.train.plans import assembled, recipe_with
from trainer.engine.assemble.assemble import assemble
from trainer.engine.core.errors import Diverged
from trainer.engine.core.local import local
from trainer.engine.launch.environment import World
from trainer.engine.precision.hardware import LossScale
from trainer.engine.train.health import Health
from trainer.engine.train.step import Gradients
from trainer.engine.train.tables import Resilience

ALONE = World(rank=0, world_size=1, local_rank=0, local_world_size=1)
CPU = torch.device("cpu")
BAD = 3
ADAMW = {"name": "adamw", "lr": 0.01, "weight_decay": 0.1}


def health(device, **changes):
    """Return a health that leaves skips to the device if it can, and its events."""
    table, events = Resilience(non_finite="skip", **changes), []
    scale, device = LossScale(torch.float32), torch.device(device)
    return Health(table, device, scale, events.append, events.append, can_skip=True), events


def examine(found, losses):
    """Return for each step whether the host lets it through, and what the device is told."""
    told = []
    for step, loss in enumerate(losses, 1):
        numbers = map(torch.tensor, (loss, loss, 1.0, [10 * loss], [10]))
        admitted = found.should_step(Gradients(*numbers), step, batch=step, lr=0.1)
        told.append((admitted, found.is_bad if found.is_bad is None else found.is_bad.item()))
    return told


def test_the_device_knows_bad_steps_at_once_and_the_host_reports_them_later():
    losses = [4.0, math.nan, 4.1, math.inf, 4.0]
    found, events = health("cuda")
    assert examine(found, losses) == [(True, float(not math.isfinite(loss))) for loss in losses]
    assert events == []
    found.verify()
    live, at_once = health("cpu")
    assert examine(live, losses) == [(math.isfinite(loss), None) for loss in losses]
    assert [str(event) for event in events] == [str(event) for event in at_once]
    assert asdict(found.counts) == asdict(live.counts)
    assert found.counts.left_out == 2


def test_too_many_steps_that_the_device_skips_end_the_run_when_the_host_looks():
    found, _ = health("cuda", max_skips=2)
    examine(found, [4.0, math.nan, math.nan, math.nan])
    with pytest.raises(Diverged, match=r"step 4: loss nan.*more than 2 bad steps in a row"):
        found.verify()


def state_of(parts):
    """Return copies of this rank's weights, buffers and optimizer state."""
    model = {name: local(each).clone() for name, each in parts.model.state_dict().items()}
    states = deepcopy(parts.step.optimizer.state_dict()["state"])
    return model | {
        f"{number}.{key}": local(value)
        for number, state in states.items()
        for key, value in state.items()
    }


def spoil_and_train(parts, *, on_device):
    """Train with NaN in the gradients of step BAD; return the state, and that around the step."""
    batches, around = parts.loader.steps(0), []
    for step in range(1, BAD + 3):
        parts.step.accumulate(next(batches))
        if step == BAD:
            for weight in parts.model.parameters():
                if weight.grad is not None:
                    local(weight.grad).fill_(math.nan)
            around.append(state_of(parts))
        if on_device:
            parts.step.update(1.0, torch.tensor(float(step == BAD)))
        elif step != BAD:
            parts.step.update(1.0)
        if step == BAD:
            around.append(state_of(parts))
        parts.step.clear()
    return state_of(parts), *around


def assert_same(found, wanted):
    assert found.keys() == wanted.keys()
    different = [name for name, value in found.items() if not torch.equal(value, wanted[name])]
    assert different == []


def compare(make):
    """Compare a step that the device skips with one that the host skips, bit by bit."""
    end, before, after = spoil_and_train(make(), on_device=True)
    assert_same(after, before)
    assert_same(end, spoil_and_train(make(), on_device=False)[0])
    assert any("exp_avg" in name for name in end)
    assert any("step" in name for name in end)


RECIPES = {
    "dense": lambda: recipe_with(optimizer=ADAMW),
    "experts": lambda: moe_recipe(moe=BALANCED, optimizer=ADAMW),
}


@pytest.mark.parametrize("name", RECIPES)
def test_a_step_that_the_device_skips_leaves_everything_as_it_was(name):
    compare(lambda: assemble(RECIPES[name](), ALONE, CPU))


def test_optimizers_over_lists_of_tensors_leave_the_decision_to_the_host():
    able = {
        name: assemble(recipe_with(optimizer={"name": name}), ALONE, CPU)
        .step.weight_update.can_skip
        for name in ("adamw", "adam", "sgd", "lion")
    }  # fmt: skip
    assert able == {"adamw": True, "adam": True, "sgd": False, "lion": False}


def sharded():
    compare(lambda: assembled(recipe_with(parallel={"shard": 2}, optimizer=ADAMW)))


@pytest.mark.matrix
def test_shards_are_skipped_alike():
    run_ranks(2, sharded)
