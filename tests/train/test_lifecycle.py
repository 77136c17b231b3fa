"""Starting, stopping, resuming and failing, in real processes."""

import errno
import os
import signal
import time
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
from trainer.engine.report.status import examine
from trainer.engine.train.step import TrainStep


def slow_steps():
    accumulate = TrainStep.accumulate

    def slowly(self, batches, *args, **options):
        time.sleep(0.02)
        return accumulate(self, batches, *args, **options)

    TrainStep.accumulate = slowly


def poison(*steps):
    """Make the gradients of these steps (counted from 1, as they are run) NaN."""
    accumulate, count = TrainStep.accumulate, [0]

    def poisoned(self, batches, *args, **options):
        gradients = accumulate(self, batches, *args, **options)
        count[0] += 1
        if count[0] in steps:
            for group in self.optimizer.param_groups:
                for weight in group["params"]:
                    weight.grad.fill_(float("nan"))
            return replace(gradients, norm=torch.full_like(gradients.norm, float("nan")))
        return gradients

    TrainStep.accumulate = poisoned


def poison_step_5():
    poison(5)


def poison_all():
    poison(*range(4, 1000))


@pytest.mark.parametrize(
    ("world", "number"),
    [(2, signal.SIGTERM), *also(*((n, signal.SIGINT) for n in (1, 2)), (1, signal.SIGTERM))],
)
def test_a_signal_to_one_rank_saves_on_all_and_the_run_goes_on_later(tmp_path, world, number):
    reference = write_recipe(tmp_path / "reference", steps=24)
    assert finish(start(reference, world)) == [0] * world
    recipe = write_recipe(tmp_path / "stopped", steps=24)
    processes = start(recipe, world, before=slow_steps)
    wait_for_lines(tmp_path / "stopped" / "run" / "metrics.jsonl", 5, processes)
    os.kill(processes[-1].pid, number)
    assert finish(processes) == [75] * world
    stopped_at, _ = tensors(tmp_path / "stopped")
    assert 4 <= stopped_at < 24
    assert finish(start(recipe, world, attempt=1)) == [0] * world
    expected = [row["loss"] for row in rows(tmp_path / "reference")]
    assert [row["loss"] for row in rows(tmp_path / "stopped")] == expected


def test_a_second_signal_exits_at_once(tmp_path):
    recipe = write_recipe(tmp_path / "run", steps=10_000)
    processes = start(recipe, before=slow_steps, overrides=["checkpoint.mode=sync"])
    wait_for_lines(tmp_path / "run" / "run" / "metrics.jsonl", 2, processes)
    os.kill(processes[0].pid, signal.SIGSTOP)  # so that the first one is not acted upon yet
    os.kill(processes[0].pid, signal.SIGINT)
    os.kill(processes[0].pid, signal.SIGCONT)
    time.sleep(0.15)
    if processes[0].is_alive():
        os.kill(processes[0].pid, signal.SIGTERM)
    assert finish(processes)[0] in (130, 75)


def test_a_run_directory_in_use_is_refused_naming_the_process(tmp_path):
    recipe = write_recipe(tmp_path / "run")
    processes = start(recipe, before=slow_steps)
    wait_for_lines(tmp_path / "run" / "run" / "metrics.jsonl", 2, processes)
    assert finish(start(recipe)) == [7]
    assert str(processes[0].pid) in complaints(recipe)
    processes[0].kill()
    finish(processes)


def test_a_changed_recipe_is_refused_with_old_and_new_values(tmp_path):
    recipe = write_recipe(tmp_path / "run", steps=6)
    assert finish(start(recipe)) == [0]
    longer = ["run.steps=12", "optimizer.lr=0.5", "metrics.interval=3"]
    assert finish(start(recipe, overrides=longer)) == [2]
    text = complaints(recipe)
    for part in ("run.steps", "optimizer.lr", "0.5", "0.01", "--allow-changed"):
        assert part in text
    assert "metrics.interval" not in text
    allowed = ["optimizer.lr", "run"]
    assert finish(start(recipe, overrides=longer, allow_changed=allowed)) == [0]
    assert rows(tmp_path / "run")[-1]["step"] == 12


def test_a_run_that_fails_before_it_trains_says_why_unless_it_has_trained_before(tmp_path):
    recipe = write_recipe(tmp_path / "run", steps=6)
    lost = ['data.sources=[{name = "text", path = "lost.txt"}]']
    assert finish(start(recipe, overrides=lost)) == [4]
    found = examine(tmp_path / "run" / "run")
    assert (found.state, found.step, found.total_steps) == ("failed", 0, None)
    assert "lost.txt: no such file" in found.reason
    assert finish(start(recipe)) == [0]
    assert finish(start(recipe, overrides=[*lost, "run.steps=9"])) == [2]
    assert examine(tmp_path / "run" / "run").state == "finished"


def test_changed_data_is_refused(tmp_path):
    recipe = write_recipe(tmp_path / "run", steps=6)
    text = tmp_path / "corpus.txt"
    text.write_text("some text to learn from. " * 400, encoding="utf-8")
    overrides = [f'data.sources=[{{name = "text", path = "{text}"}}]', "schedule.name=constant"]
    cache = [f"data.cache_dir={tmp_path / 'cache'}"]
    assert finish(start(recipe, overrides=[*overrides, *cache])) == [0]
    text.write_text("other text to learn from. " * 400, encoding="utf-8")
    longer = [*overrides, *cache, "run.steps=9"]
    assert finish(start(recipe, overrides=longer)) == [2]
    assert "content changed" in complaints(recipe)
    assert finish(start(recipe, overrides=longer, allow_changed=["data"])) == [0]


def test_a_damaged_checkpoint_is_skipped_with_a_word_and_the_one_before_used(tmp_path):
    recipe = write_recipe(tmp_path / "run", steps=12)
    assert finish(start(recipe)) == [0]
    expected = [row["loss"] for row in rows(tmp_path / "run")]
    newest = max((tmp_path / "run" / "run" / "checkpoints").glob("step-*/*.safetensors"))
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 1
    newest.write_bytes(content)
    assert finish(start(recipe)) == [0]
    assert [row["loss"] for row in rows(tmp_path / "run")] == expected


def test_without_an_intact_checkpoint_the_run_does_not_start_anew(tmp_path):
    recipe = write_recipe(tmp_path / "run", steps=6)
    assert finish(start(recipe)) == [0]
    for manifest in (tmp_path / "run" / "run" / "checkpoints").glob("step-*/manifest.json"):
        manifest.write_text("{}", encoding="utf-8")
    assert finish(start(recipe)) == [5]


def test_resume_never_does_not_mix_two_runs(tmp_path):
    recipe = write_recipe(tmp_path / "run", steps=6)
    assert finish(start(recipe)) == [0]
    assert finish(start(recipe, overrides=["run.resume=never"])) == [2]


def test_a_finished_run_is_left_as_it_is(tmp_path):
    recipe = write_recipe(tmp_path / "run", steps=6)
    last = "checkpoint.last=weights"
    assert finish(start(recipe, overrides=[last])) == [0]
    step, state = tensors(tmp_path / "run")
    assert step == 6
    assert all(name.startswith("model.") for name in state)
    assert finish(start(recipe, overrides=[last])) == [0]
    assert [row["step"] for row in rows(tmp_path / "run")] == list(range(1, 7))


def test_weights_of_one_run_start_another(tmp_path):
    first = write_recipe(tmp_path / "first", steps=6)
    assert finish(start(first)) == [0]
    second = write_recipe(tmp_path / "second", steps=5)
    init = f"run.init_from={tmp_path / 'first' / 'run'}"
    assert finish(
        start(second, overrides=[init, "optimizer.lr=0.0", "optimizer.weight_decay=0.0"])
    ) == [0]
    _, begun = tensors(tmp_path / "first")
    _, taken = tensors(tmp_path / "second")
    for name in begun:
        if name.startswith("model."):
            assert torch.equal(begun[name], taken[name]), name


def test_non_finite_gradients_stop_the_run_and_are_never_saved(tmp_path):
    recipe = write_recipe(tmp_path / "run", steps=20)
    assert finish(start(recipe, before=poison_step_5)) == [6]
    assert "step 5" in complaints(recipe)
    step, state = tensors(tmp_path / "run")
    assert step == 3
    assert all(value.isfinite().all() for value in state.values() if value.is_floating_point())


@pytest.mark.parametrize("world", [2, *also(1)])
def test_a_skipped_step_changes_no_weight_and_the_run_goes_on(tmp_path, world):
    recipe = write_recipe(tmp_path / "run", steps=20)
    skip = ["resilience.non_finite=skip"]
    assert finish(start(recipe, world, before=poison_step_5, overrides=skip)) == [0] * world
    assert [row["step"] for row in rows(tmp_path / "run")] == list(range(1, 21))
    _, state = tensors(tmp_path / "run")
    assert all(value.isfinite().all() for value in state.values() if value.is_floating_point())


@pytest.mark.parametrize("policy", ["skip", "rollback"])
def test_too_many_bad_steps_end_the_run(tmp_path, policy):
    recipe = write_recipe(tmp_path / "run", steps=100)
    overrides = [f"resilience.non_finite={policy}", "resilience.max_skips=3"]
    assert finish(start(recipe, before=poison_all, overrides=overrides)) == [6]
    assert "3 bad steps in a row" in complaints(recipe)


def test_a_rollback_goes_back_to_the_checkpoint_and_past_the_data(tmp_path):
    recipe = write_recipe(tmp_path / "run", steps=12)
    rollback = ["resilience.non_finite=rollback"]
    assert finish(start(recipe, before=poison_step_5, overrides=rollback)) == [0]
    steps = [row["step"] for row in rows(tmp_path / "run")]
    assert steps == list(range(1, 13))
    untouched = write_recipe(tmp_path / "untouched", steps=12)
    assert finish(start(untouched)) == [0]
    before, after = (
        [row["loss"] for row in rows(tmp_path / name)] for name in ("untouched", "run")
    )
    assert after[:3] == before[:3]
    assert all(a != b for a, b in zip(after[3:], before[3:], strict=True)), (
        "other data from here on"
    )


def fail_two_saves():
    """Make the second and third save fail as on a full disk, in the background."""
    import trainer.engine.checkpoint.writer as writer

    write, count = writer.Writer.write, [0]

    def failing(self, folder):
        count[0] += 1
        if count[0] in (2, 3):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(self, folder)

    writer.Writer.write = failing


@pytest.mark.parametrize("mode", ["async", *also("sync")])
def test_the_run_outlives_two_failed_saves(tmp_path, mode):
    recipe = write_recipe(tmp_path / "run", steps=12)
    mode = [f"checkpoint.mode={mode}"]
    assert finish(start(recipe, before=fail_two_saves, overrides=mode)) == [0]
    assert tensors(tmp_path / "run")[0] == 12


def test_workers_that_read_ahead_do_not_change_a_stopped_and_resumed_run(tmp_path):
    reference = write_recipe(tmp_path / "reference", steps=20)
    assert finish(start(reference)) == [0]
    recipe = write_recipe(tmp_path / "workers", steps=20)
    processes = start(recipe, before=slow_steps, overrides=["data.workers=2"])
    wait_for_lines(tmp_path / "workers" / "run" / "metrics.jsonl", 5, processes)
    os.kill(processes[0].pid, signal.SIGTERM)
    assert finish(processes) == [75]
    assert finish(start(recipe, overrides=["data.workers=1"])) == [0]
    expected = [row["loss"] for row in rows(tmp_path / "reference")]
    assert [row["loss"] for row in rows(tmp_path / "workers")] == expected
