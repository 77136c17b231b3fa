"""What a run does about spikes and numbers that are not finite, and what it says when it ends."""

import math
from dataclasses import replace

import pytest
import torch

from tests.cases import also
from tests.train.processes import (
    complaints,
    finish,
    rows,
    start,
    tensors,
    wait_for_lines,
    write_recipe,
)
from tests.train.test_lifecycle import slow_steps
from trainer.engine.core.errors import Diverged
from trainer.engine.observe.metrics import read_events
from trainer.engine.precision.hardware import LossScale
from trainer.engine.report.status import examine
from trainer.engine.train.health import Health
from trainer.engine.train.step import Gradients, TrainStep
from trainer.engine.train.tables import Resilience

LOSSES = [4.0 + 0.1 * (step % 3) for step in range(40)]


def health(policy="warn", device="cpu", **changes):
    """Return a health, what it reports, and its events."""
    table = Resilience(spike=policy, spike_window=16, **changes)
    reports, events = [], []
    scale = LossScale(torch.float32)
    found = Health(table, torch.device(device), scale, reports.append, events.append)
    return found, reports, events


def admit(found, losses, norms=None, start=1):
    """Return which steps may be applied."""
    norms = [1.0] * len(losses) if norms is None else norms
    admitted = []
    for step, (loss, norm) in enumerate(zip(losses, norms, strict=True), start):
        numbers = map(torch.tensor, (loss, loss, norm, [10 * loss], [10]))
        admitted.append(found.should_step(Gradients(*numbers), step, batch=step, lr=0.1))
    return admitted


def test_a_spike_is_told_once_and_a_row_of_them_is_one_event():
    found, reports, events = health()
    assert all(admit(found, [*LOSSES, 40.0, 41.0, 42.0, 4.0, 4.1, 50.0]))
    assert [(event.kind, event.step) for event in events] == [("spike", 41), ("spike", 46)]
    assert reports[0].startswith("step 41: spike: loss 40 (median 4.1, limit 5.")
    assert found.conclude() == []


def test_off_looks_at_nothing():
    found, reports, events = health("off")
    assert all(admit(found, [*LOSSES, *[1e7] * 40]))
    assert (reports, events, found.conclude()) == ([], [], [])


def test_a_skipped_spike_does_not_get_usual_and_too_many_end_the_run():
    found, reports, events = health("skip", max_skips=3)
    assert admit(found, [*LOSSES, 40.0, 41.0, 4.0]) == [True] * 40 + [False, False, True]
    assert found.conclude() == ["steps skipped or rolled back: 2 (see events.jsonl)"]
    with pytest.raises(Diverged, match="more than 3 bad steps in a row"):
        admit(found, [40.0] * 4, start=44)
    assert [event.action for event in events] == ["skip"] * 6
    assert "step skipped (1 of at most 3 in a row)" in reports[0]


def test_a_gpu_is_not_waited_for_under_warn_and_says_the_same_later():
    losses = [*LOSSES, 40.0, *LOSSES[:5]]
    found, _, events = health(device="cuda")
    assert all(admit(found, losses))
    assert events == []
    found.verify()
    live, _, at_once = health()
    admit(live, losses)
    assert events == at_once
    assert found.state() == live.state()


def test_on_a_gpu_a_step_that_is_not_finite_ends_the_run_when_the_host_looks():
    found, _, events = health(device="cuda")
    admit(found, [4.0, math.inf, math.nan])
    with pytest.raises(Diverged, match="step 2: loss or gradient is not finite: inf and"):
        found.verify()
    assert [(event.kind, event.step) for event in events] == [("non_finite", 2)]


def test_a_finite_explosion_is_no_silent_end():
    """From 4 to 1e7 in 1,500 steps, 1 % each: never a spike, but a run that diverges."""
    found, reports, events = health()
    admit(found, [*LOSSES, *(4.0 * 1.01**step for step in range(1500))])
    assert events[0].kind == "drift"
    assert "training is diverging: the loss is" in reports[0]
    assert len(reports) == 1
    assert found.conclude()[0].startswith("training diverged: the loss is 1.")


def test_a_validation_that_is_not_finite_and_a_run_without_gradients_are_told():
    found, reports, _ = health()
    found.check_evaluation(10, math.nan)
    admit(found, [0.0] * 20, [0.0] * 20)
    told = ["the validation loss at step 10 is nan", "nothing was learned: no step had a gradient"]
    assert found.conclude() == told
    assert reports == told[:1]


def events_of(folder):
    return [
        {key: value for key, value in event.items() if key not in ("time", "attempt")}
        for event in read_events(folder / "run")
    ]


def burst():
    """Raise the learning rate to the hundredfold in step 14."""
    update, count = TrainStep.update, [0]

    def bursting(self, lr_factor, is_bad=None):
        count[0] += 1
        update(self, lr_factor * (100 if count[0] == 14 else 1))

    TrainStep.update = bursting


def outlier():
    """Make the gradient of the 14th step a hundred times too large."""
    accumulate, count = TrainStep.accumulate, [0]

    def changed(self, batches, *args, **options):
        gradients = accumulate(self, batches, *args, **options)
        count[0] += 1
        factor = 100 if count[0] == 14 else 1
        return replace(gradients, norm=gradients.norm * factor)

    TrainStep.accumulate = changed


def test_a_burst_of_the_learning_rate_is_recorded_with_its_samples(tmp_path):
    recipe = write_recipe(tmp_path / "run", steps=24)
    window = ["resilience.spike_window=16"]
    assert finish(start(recipe, before=burst, overrides=window)) == [0]
    event = events_of(tmp_path / "run")[0]
    assert (event["id"], event["step"], event["batch"]) == ("spike-15", 15, 15)
    assert "loss" in event["signals"]
    assert event["loss"] > event["loss_limit"] > event["loss_median"]
    assert event["loss"] == pytest.approx(rows(tmp_path / "run")[14]["loss"], rel=1e-6)
    assert event["samples"]["0.synthetic"]["samples"] == list(range(112, 120))
    status = examine(tmp_path / "run" / "run")
    assert (status.state, status.newest_event) == ("finished", "drift-22")
    assert any("training diverged" in text for text in status.warnings)


@pytest.mark.parametrize(
    ("policy", "world"), [("skip", 1), ("rollback", 1), *also(("skip", 2), ("rollback", 2))]
)
def test_a_spike_is_not_trained_on(tmp_path, policy, world):
    recipe = write_recipe(tmp_path / "run", steps=20)
    overrides = ["resilience.spike_window=8", f"resilience.spike={policy}"]
    assert finish(start(recipe, world, before=outlier, overrides=overrides)) == [0] * world
    assert [row["step"] for row in rows(tmp_path / "run")] == list(range(1, 21))
    (event,) = events_of(tmp_path / "run")
    assert (event["id"], event["action"], event["signals"]) == ("spike-14", policy, ["grad_norm"])
    untouched = write_recipe(tmp_path / "untouched", steps=20)
    assert finish(start(untouched, world)) == [0] * world
    kept = 14 if policy == "skip" else 12
    for name in ("loss", "grad_norm"):
        found, usual = (
            [row[name] for row in rows(tmp_path / where)] for where in ("run", "untouched")
        )
        assert found[:13] == usual[:13] or policy == "rollback"
        assert found[:12] == usual[:12]
        assert all(a != b for a, b in zip(found[kept:], usual[kept:], strict=True))


def test_a_stopped_run_decides_as_one_that_was_not(tmp_path):
    """Nearly every step is a spike, so that decisions depend on all that came before."""
    overrides = ["resilience.spike_window=8", "resilience.spike=skip",
                 "resilience.spike_threshold=0.1", "resilience.max_skips=20"]  # fmt: skip
    whole = write_recipe(tmp_path / "whole", steps=24)
    assert finish(start(whole, overrides=overrides)) == [0]
    assert len(events_of(tmp_path / "whole")) > 3
    recipe = write_recipe(tmp_path / "run", steps=24)
    processes = start(recipe, before=slow_steps, overrides=overrides)
    wait_for_lines(tmp_path / "run" / "run" / "metrics.jsonl", 12, processes)
    processes[0].kill()
    finish(processes)
    assert finish(start(recipe, overrides=overrides)) == [0]
    assert events_of(tmp_path / "run") == events_of(tmp_path / "whole")
    for name in ("loss", "grad_norm"):
        found, expected = (
            [row[name] for row in rows(tmp_path / where)] for where in ("run", "whole")
        )
        assert found == expected


def spoil():
    """Let the update of step 6 write a NaN, which no loss has shown yet."""
    update, count = TrainStep.update, [0]

    def spoiling(self, lr_factor, is_bad=None):
        update(self, lr_factor, is_bad)
        count[0] += 1
        if count[0] == 6:
            with torch.no_grad():
                self.optimizer.param_groups[0]["params"][0].view(-1)[0] = math.nan

    TrainStep.update = spoiling


@pytest.mark.parametrize("policy", ["stop", "skip", "rollback"])
def test_weights_that_an_update_has_spoiled_are_never_saved(tmp_path, policy):
    """After step 6 comes a checkpoint, and at the end of six steps nothing else."""
    recipe = write_recipe(tmp_path / "run", steps=6)
    overrides = [f"resilience.non_finite={policy}"]
    assert finish(start(recipe, before=spoil, overrides=overrides)) == [6]
    assert "step 6: model." in complaints(recipe)
    assert "is not finite after the update" in complaints(recipe)
    assert tensors(tmp_path / "run")[0] == 3


def test_a_rollback_recovers_from_weights_that_an_update_has_spoiled(tmp_path):
    recipe = write_recipe(tmp_path / "run", steps=12)
    overrides = ["resilience.non_finite=rollback"]
    assert finish(start(recipe, before=spoil, overrides=overrides)) == [0], complaints(recipe)
    assert examine(tmp_path / "run" / "run").warnings == [
        "steps skipped or rolled back: 1 (see events.jsonl)"
    ]
    step, state = tensors(tmp_path / "run")
    assert step == 12
    assert all(value.isfinite().all() for value in state.values() if value.is_floating_point())
