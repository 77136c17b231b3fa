"""Which rows the ranks read, and in which order."""

import numpy as np

from tests.known_bugs import runs
from tests.known_bugs.catalogue import known_bug
from tests.known_bugs.ranks import on_ranks
from tests.known_bugs.reports.resume import RUN
from tests.known_bugs.runs import assembled
from trainer.engine.assemble import assemble as assembling
from trainer.engine.data.loader import Loader
from trainer.engine.parallel.plan import Plan


def skip_in_every_epoch(patch):
    original = Loader.step

    def step(self, number):
        rows = self.samples.rows_per_epoch // 4
        return original(self, number + number // rows)

    patch.setattr(Loader, "step", step)


@known_bug(
    "allenai/open-instruct#681",
    "The batches that a resumed run skips were skipped again in each later epoch.",
    skip_in_every_epoch,
)
def every_row_is_read_once_an_epoch():
    parts = assembled(**RUN, run={"steps": 12})
    batches, epoch = parts.loader.steps(0), parts.data.turns[0].opened.train.rows_per_epoch
    rows = []
    while len(rows) < 3 * epoch:
        rows += [tuple(row) for each in next(batches) for row in each.tokens.tolist()]
    for number in range(3):
        assert len(set(rows[number * epoch : (number + 1) * epoch])) == epoch


def rows_of_ranks(changes):
    """Return the rows that this rank reads in three steps."""
    parts = assembled(**changes)
    batches = parts.loader.steps(0)
    return [tuple(row) for _ in range(3) for each in next(batches) for row in each.tokens.tolist()]


def take_the_state_of_the_first_rank(patch):
    patch.setattr(Plan, "data_rank", property(lambda self: 0))


@known_bug(
    "PrimeIntellect-ai/prime-rl#1035",
    "The place of one rank in the data was saved for all, and ranks read the same samples.",
    take_the_state_of_the_first_rank,
    world=2,
)
def ranks_read_different_samples():
    found = on_ranks(2, rows_of_ranks, {"parallel": {"replicate": 2, "shard": 1}})
    (expected,) = on_ranks(1, rows_of_ranks, {})
    assert not set(found[0]) & set(found[1])
    assert sorted(found[0] + found[1]) == sorted(expected)


def wrap_each_rank_alone(patch):
    original = Loader.step

    def step(self, number):
        ranks = self.table.global_batch // len(self.share)
        if ranks == 1:
            return original(self, number)
        own = np.arange(self.rank, self.samples.rows_per_epoch, ranks)
        places = number * len(self.share) + np.arange(len(self.share))
        return self.samples.gather(np.sort(own[places % len(own)]))

    patch.setattr(Loader, "step", step)


@known_bug(
    "NVIDIA-NeMo/Megatron-Bridge#5944",
    "Each rank left out what remained of its own part of an epoch, so that ranks began the next"
    " epoch in different steps and read samples twice.",
    wrap_each_rank_alone,
)
def ranks_together_read_the_rows_of_one():
    parts = assembled(**RUN, run={"steps": 12})
    samples = parts.data.turns[0].opened.train
    table = parts.recipe.data.model_copy(update={"global_batch": 6})
    alone = Loader(samples, table, 0, 1).steps(0)
    ranks = [Loader(samples, table, rank, 3).steps(0) for rank in range(3)]
    for _ in range(8):
        expected = sorted(tuple(row) for each in next(alone) for row in each.tokens.tolist())
        found = [tuple(r) for rank in ranks for each in next(rank) for r in each.tokens.tolist()]
        assert sorted(found) == expected


def shuffle_with_a_seed_of_the_rank(patch):
    original = assembling.assemble

    def assemble(recipe, world, device):
        run = recipe.run.model_copy(update={"seed": recipe.run.seed + world.rank})
        return original(recipe.model_copy(update={"run": run}), world, device)

    patch.setattr(runs, "assemble", assemble)


@known_bug(
    "NVlabs/LongLive#71",
    "Each rank shuffled with a seed of its own, so that ranks read some samples together and others"
    " not at all.",
    shuffle_with_a_seed_of_the_rank,
    world=2,
)
def ranks_divide_one_order():
    found = on_ranks(2, rows_of_ranks, {"parallel": {"replicate": 2, "shard": 1}})
    (expected,) = on_ranks(1, rows_of_ranks, {})
    assert sorted(found[0] + found[1]) == sorted(expected)
