"""Resuming: a run that was interrupted ends as one that was not, and reads the same data."""

import random
import tempfile
from pathlib import Path

import numpy as np
import torch

from tests.known_bugs.catalogue import known_bug
from tests.known_bugs.ranks import on_ranks
from tests.known_bugs.reports.experts import BALANCED
from tests.known_bugs.runs import assembled, assert_equal, whole
from trainer.engine.checkpoint import state
from trainer.engine.data.loader import TurnLoader
from trainer.engine.data.order import TrainingOrder
from trainer.engine.optim.tables import ScheduleConfig
from trainer.engine.run.own_loop import open_saver
from trainer.engine.train.parts import Best
from trainer.engine.train.saving import Saver
from trainer.engine.train.tables import Evaluate
from trainer.model_zoo.layers.moe import moe_layers

STEPS, INTERRUPTED = 6, 4
RUN = {
    "optimizer": {"name": "adamw", "lr": 0.01, "eps": 1e-4},
    "schedule": {"name": "linear", "warmup_steps": 2},
    "checkpoint": {"mode": "sync"},
    # An epoch has 11 rows: the run is interrupted in the second epoch.
    "data": {"sources": [{"name": "synthetic", "num_documents": 11, "document_tokens": 8}]},
}


def train_until(folder, last, **changes):
    """Train from the newest checkpoint of a folder to a step, save, and return what was seen."""
    parts = assembled(**{**RUN, **changes}, run={"dir": str(folder), "name": "run", "steps": STEPS})
    seen = []
    with open_saver(parts) as (saver, position):
        batches = parts.loader.steps(position.batch)
        while position.step < last:
            factor = parts.schedule.lr_factor(position.step, parts.total_steps)
            batch = next(batches)
            seen += [tuple(row) for each in batch for row in each.tokens.tolist()]
            parts.step.accumulate(batch, factor)
            parts.step.update(factor)
            parts.step.clear()
            position.step += 1
            position.batch += 1
        saver.save_last(position)
    weights = {name: whole(weight) for name, weight in parts.model.named_parameters()}
    return weights, seen, parts


def assert_resumes_as_if_never_interrupted(what="weights"):
    with tempfile.TemporaryDirectory() as folder:
        expected, rows, _ = train_until(Path(folder, "whole"), STEPS)
        _, first, _ = train_until(Path(folder, "parts"), INTERRUPTED)
        found, second, _ = train_until(Path(folder, "parts"), STEPS)
    if what == "rows":
        assert first + second == rows
        return
    for name, weight in found.items():
        assert (weight == expected[name]).all(), name


def forget_moments(patch):
    original = Saver.restore

    def restore(self, *args, **options):
        original(self, *args, **options)
        for each in self._parts.optimizer.state.values():
            each["exp_avg"].zero_()
            each["exp_avg_sq"].zero_()

    patch.setattr(Saver, "restore", restore)


@known_bug(
    "KempnerInstitute/KempnerForge#115",
    "A fresh optimizer has no moments to read a checkpoint into, and so the saved ones were"
    " dropped.",
    forget_moments,
)
def moments_of_the_optimizer_are_restored():
    assert_resumes_as_if_never_interrupted()


def forget_biases(patch):
    original = Saver.restore

    def restore(self, *args, **options):
        original(self, *args, **options)
        for moe in moe_layers(self._parts.model).values():
            moe.router.bias.zero_()

    patch.setattr(Saver, "restore", restore)


@known_bug(
    "flagos-ai/FlagScale#411",
    "The biases that balance experts are no parameters, and were neither saved nor restored.",
    forget_biases,
)
def biases_of_experts_are_restored():
    with tempfile.TemporaryDirectory() as folder:
        runs = [train_until(Path(folder), INTERRUPTED, model=BALANCED)[2] for _ in range(2)]
    saved, restored = (
        torch.stack([moe.router.bias for moe in moe_layers(parts.model).values()]) for parts in runs
    )
    assert saved.any()
    assert_equal(restored, saved)


def count_the_step_twice(patch):
    original = ScheduleConfig.lr_factor

    def restore(self, path, manifest, position, **options):
        restored(self, path, manifest, position, **options)

        def factor(table, step, total):
            return original(table, step + manifest.step, total)

        patch.setattr(ScheduleConfig, "lr_factor", factor)

    restored = Saver.restore
    patch.setattr(Saver, "restore", restore)


@known_bug(
    "THUDM/slime#1547",
    "Loading a checkpoint had advanced the schedule already, and resuming advanced it once more.",
    count_the_step_twice,
)
def the_schedule_resumes_where_it_was():
    assert_resumes_as_if_never_interrupted()


def begin_in_the_first_epoch(patch):
    steps, locate = TurnLoader.steps, TrainingOrder.locate_epochs
    resumed = []

    def steps_from(self, first_step):
        if first_step:
            _, epochs, _ = locate(self.loaders[0].samples.order, np.array([first_step * 4]))
            resumed.append(epochs[0])
        return steps(self, first_step)

    def locate_epochs(self, samples):
        source, epoch, index = locate(self, samples)
        return source, epoch - (resumed[-1] if resumed else 0), index

    patch.setattr(TurnLoader, "steps", steps_from)
    patch.setattr(TrainingOrder, "locate_epochs", locate_epochs)


@known_bug(
    "huggingface/accelerate#4071",
    "A run that was resumed within a later epoch read the rest of it in the order of the first.",
    begin_in_the_first_epoch,
)
def a_later_epoch_resumes_in_its_own_order():
    assert_resumes_as_if_never_interrupted("rows")


def shuffle_anew(patch):
    original = TurnLoader.steps

    def steps(self, first_step):
        if first_step:
            self.loaders[0].samples.order.keys = self.loaders[0].samples.order.keys + np.uint64(1)
        return original(self, first_step)

    patch.setattr(TurnLoader, "steps", steps)


@known_bug(
    "huggingface/accelerate#4195",
    "The place in the data was saved and the shuffled order was not: a resumed run went to the"
    " same place in another order.",
    shuffle_anew,
)
def a_resumed_run_has_the_same_order():
    assert_resumes_as_if_never_interrupted("rows")


def start_over(patch):
    original = TurnLoader.steps
    patch.setattr(TurnLoader, "steps", lambda self, first_step: original(self, 0))


@known_bug(
    "pytorch/torchtitan#838",
    "Skipping to a place in a stream gave other documents than reading up to it.",
    start_over,
)
def a_resumed_run_does_not_repeat_data():
    assert_resumes_as_if_never_interrupted("rows")


def take_the_next_place(patch):
    original = TurnLoader.steps

    def steps(self, first_step):
        return original(self, first_step + (first_step > 0))

    patch.setattr(TurnLoader, "steps", steps)


@known_bug(
    "pytorch/torchtitan#4686",
    "The place in the data came from a newer checkpoint than the weights, and a step's data were"
    " left out.",
    take_the_next_place,
)
def weights_and_data_resume_at_the_same_step():
    assert_resumes_as_if_never_interrupted("rows")


def draw_after_resuming(changes, folder):
    """Return random numbers that a run draws, and those that it draws after resuming."""
    run = {"dir": str(folder), "name": "run", "steps": 4}
    parts = assembled(**changes, run=run, checkpoint={"mode": "sync"})
    rank = parts.world.rank
    state.seed_everything(7, rank)
    with open_saver(parts) as (saver, position):
        parts.step.accumulate(next(parts.loader.steps(0)))
        parts.step.update(1.0)
        position.step += 1
        position.batch += 1
        saver.save_last(position)
    expected = torch.rand(3).tolist(), random.random()
    state.seed_everything(8, rank)
    parts = assembled(**changes, run=run, checkpoint={"mode": "sync"})
    with open_saver(parts):
        return expected, (torch.rand(3).tolist(), random.random())


def restore_the_first_rank_s(patch):
    original = state.restore_random_state

    def restore(rank, tensors):
        original(rank, tensors)
        torch.distributed.broadcast(tensors[f"rng.{rank}.torch"], 0)
        original(rank, tensors)

    patch.setattr(state, "restore_random_state", restore)


@known_bug(
    "NVIDIA/Megatron-LM#6858",
    "Random numbers of a rank were saved as copies of another's, and most ranks resumed with the"
    " stream of one.",
    restore_the_first_rank_s,
    world=2,
)
def every_rank_resumes_with_its_own_random_numbers():
    with tempfile.TemporaryDirectory() as folder:
        found = on_ranks(
            2, draw_after_resuming, {"parallel": {"replicate": 2, "shard": 1}}, Path(folder)
        )
    assert found[0][0] != found[1][0]
    for expected, drawn in found:
        assert drawn == expected


def forget_patience(patch):
    def from_manifest(extra):
        return Best(**{**extra.get("best", {}), "bad": 0})

    patch.setattr(Best, "from_manifest", staticmethod(from_manifest))


@known_bug(
    "huggingface/transformers#28544",
    "The evaluations without improvement were not saved, and patience began again with each"
    " resume.",
    forget_patience,
)
def patience_survives_an_interruption():
    table = Evaluate(patience=3)
    run = {"steps": 4, "name": "run"}
    with tempfile.TemporaryDirectory() as folder:
        for loss in (2.0, 3.0, 3.0):
            parts = assembled(run={**run, "dir": folder}, checkpoint={"mode": "sync"})
            with open_saver(parts) as (saver, position):
                position.step += 1
                position.best.update(table, position.step, {"loss": loss})
                saver.save_last(position)
        assert position.best.bad == 2
        assert_equal(position.best.score, 2.0)
