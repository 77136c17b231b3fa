"""Where pipelines are cut."""

import random
from itertools import combinations, pairwise

import pytest

from trainer.engine.parallel.cut import Cut, balanced, cut_blocks, num_stages
from trainer.engine.recipe.tables import Pipelining
from trainer.model_zoo.llama3.config import Llama3Config


def sizes(ends):
    return [end - start for start, end in pairwise((0, *ends))]


def costs(ends, first, last):
    found = [float(size) for size in sizes(ends)]
    found[0] += first
    found[-1] += last
    return found


@pytest.mark.parametrize("seed", range(20))
def test_no_cut_has_a_cheaper_most_expensive_stage(seed):
    draw = random.Random(seed)
    blocks = draw.randint(1, 12)
    stages = draw.randint(1, blocks)
    first, last = draw.choice([0, 0.3, 2.5]), draw.choice([0, 0.7, 3.2])
    cuts = [(*inner, blocks) for inner in combinations(range(1, blocks), stages - 1)]
    least = min(max(costs(cut, first, last)) for cut in cuts)
    found = balanced(blocks, stages, first, last)
    assert found in cuts
    assert max(costs(found, first, last)) == pytest.approx(least)


def test_stages_without_ends_are_equal():
    assert sizes(balanced(12, 4, 0, 0)) == [3, 3, 3, 3]
    assert sizes(balanced(80, 16, 0, 0)) == [5] * 16


def test_the_head_takes_the_place_of_blocks():
    """70B: the head's products are those of 1.22 blocks."""
    config = Llama3Config(flavor="70b", vocab_size=128_256)
    block = 2 * config.dim * (64 + 8) * 128 + 3 * config.dim * config.ffn_dim
    assert config.head_cost == pytest.approx(config.dim * config.vocab / block)
    cut = cut_blocks(Pipelining(), 8, config)
    assert sizes(cut.ends)[-1] == min(sizes(cut.ends))


@pytest.mark.parametrize(
    ("schedule", "holders"),
    [
        ("1F1B", [0, 1, 2]),
        ("Interleaved1F1B", [0, 1, 2, 0, 1, 2]),
        ("ZBVZeroBubble", [0, 1, 2, 2, 1, 0]),
        ("DualPipeV", [0, 1, 2, 2, 1, 0]),
    ],
)
def test_stages_lie_on_ranks_as_schedules_want_them(schedule, holders):
    config = Llama3Config(flavor="debug", n_layers=7, vocab_size=64)
    table = Pipelining(schedule=schedule)
    cut = cut_blocks(table, 3, config)
    assert [cut.rank_of(stage) for stage in range(cut.stages)] == holders
    assert cut.stages == num_stages(table, 3)
    held = [block for stage in range(cut.stages) for block in cut.blocks(stage)]
    assert held == list(range(7))
    assert sorted(stage for rank in range(3) for stage in cut.stages_of(rank)) == list(
        range(cut.stages)
    )


def test_a_recipe_can_say_where():
    config = Llama3Config(flavor="debug", n_layers=7, vocab_size=64)
    cut = cut_blocks(Pipelining(layers_per_stage=[4, 1, 2]), 3, config)
    assert cut == Cut(3, (4, 5, 7))
    assert cut.blocks(1) == range(4, 5)
