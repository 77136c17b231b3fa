"""Where pipelines are cut."""

import random
from itertools import combinations, pairwise

import pytest
import torch
from torch import nn

from tests.distributed import run_ranks
from tests.train.plans import BASE, assembled, recipe_with
from trainer.engine.data.tables import Data
from trainer.engine.parallel.materialize import without_storage
from trainer.engine.parallel.pipeline import measure
from trainer.engine.parallel.pipeline.cut import (
    EndCosts,
    StageSplit,
    balance_stages,
    cut_blocks,
    num_stages,
    stage_costs,
)
from trainer.engine.parallel.pipeline.measure import part_seconds
from trainer.engine.parallel.tables import Pipelining
from trainer.engine.tasks.language_modeling.config import LanguageModeling
from trainer.engine.tasks.tables import CrossEntropy, TaskSettings
from trainer.kernels.choose import choose
from trainer.model_zoo.base import Model
from trainer.model_zoo.deepseek_v3.config import DeepSeekV3Config
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
    found = balance_stages(blocks, stages, first, last)
    assert found in cuts
    assert max(costs(found, first, last)) == pytest.approx(least)


def test_stages_without_ends_are_equal():
    assert sizes(balance_stages(12, 4, 0, 0)) == [3, 3, 3, 3]
    assert sizes(balance_stages(80, 16, 0, 0)) == [5] * 16


def test_the_head_takes_the_place_of_blocks():
    """70B: the head's products are those of 1.22 blocks."""
    config = Llama3Config(flavor="70b", vocab_size=128_256)
    block = 2 * config.dim * (64 + 8) * 128 + 3 * config.dim * config.ffn_dim
    assert config.head_cost == pytest.approx(config.dim * config.vocab / block)
    cut = cut_blocks(Pipelining(), 8, config)
    assert sizes(cut.ends)[-1] == min(sizes(cut.ends))


@pytest.mark.parametrize(
    ("schedule", "stage_to_rank"),
    [
        ("1F1B", [0, 1, 2]),
        ("Interleaved1F1B", [0, 1, 2, 0, 1, 2]),
        ("ZBVZeroBubble", [0, 1, 2, 2, 1, 0]),
        ("DualPipeV", [0, 1, 2, 2, 1, 0]),
    ],
)
def test_stages_lie_on_ranks_as_schedules_want_them(schedule, stage_to_rank):
    config = Llama3Config(flavor="debug", n_layers=7, vocab_size=64)
    table = Pipelining(schedule=schedule)
    cut = cut_blocks(table, 3, config)
    assert [cut.rank_of(stage) for stage in range(cut.stages)] == stage_to_rank
    assert cut.stages == num_stages(table, 3)
    held = [block for stage in range(cut.stages) for block in cut.blocks(stage)]
    assert held == list(range(7))
    assert sorted(stage for rank in range(3) for stage in cut.stages_of(rank)) == list(
        range(cut.stages)
    )


def test_a_recipe_can_say_where():
    config = Llama3Config(flavor="debug", n_layers=7, vocab_size=64)
    cut = cut_blocks(Pipelining(layers_per_stage=[4, 1, 2]), 3, config)
    assert cut == StageSplit(3, (4, 5, 7), (0, 1, 2))
    assert cut.blocks(1) == range(4, 5)


def test_the_embedding_takes_some_place_too():
    """Of 8B on an H100: 16 bytes an element of a row, 3 products a weight of a block."""
    config = Llama3Config(flavor="8b", vocab_size=128_256)
    block = 2 * config.dim * (32 + 8) * 128 + 3 * config.dim * config.ffn_dim
    bytes_a_second, products_a_second = 3.35e12, 989e12 / 2
    expected = (16 * config.dim / bytes_a_second) / (3 * block / products_a_second)
    assert config.embed_cost == pytest.approx(expected, rel=0.02)
    costs = EndCosts(config.embed_cost, 0)
    assert sizes(cut_blocks(Pipelining(), 3, config, costs).ends) == [10, 11, 11]


def test_costs_that_were_measured_decide():
    config = Llama3Config(flavor="debug", n_layers=10, vocab_size=64)
    assert sizes(cut_blocks(Pipelining(), 2, config, EndCosts(0, 4)).ends) == [7, 3]
    assert sizes(cut_blocks(Pipelining(), 2, config, EndCosts(4, 0)).ends) == [3, 7]
    cut = cut_blocks(Pipelining(), 2, config, EndCosts(0, 4))
    assert stage_costs(cut, config) == [7 + config.embed_cost, 3 + config.head_cost]


def test_the_last_stage_holds_the_blocks_of_further_predictions():
    config = DeepSeekV3Config(flavor="debug", n_layers=6, mtp_depth=2, vocab_size=64)
    cut = cut_blocks(Pipelining(layers_per_stage=[4, 2]), 2, config)
    assert [cut.held_blocks(stage) for stage in range(2)] == [range(4), range(4, 8)]
    assert cut.has_embedding(1)
    assert (cut.other_end(0), cut.other_end(1)) == (1, 0)
    without = config.model_copy(update={"mtp_depth": 0})
    # Each costs a block and the projection of the head.
    assert config.head_cost == pytest.approx(3 * without.head_cost + 2)
    assert not cut_blocks(Pipelining(), 2, without).has_embedding(1)


def test_modules_by_name_may_leave_the_ends_alone():
    config = Llama3Config(flavor="debug", n_layers=2, vocab_size=64)
    names = [["embed"], ["layers.0", "layers.1"], ["head"]]
    cut = cut_blocks(Pipelining(modules_per_stage=names), 3, config)
    assert cut == StageSplit(3, (0, 2, 2), (0, 1, 2))
    names = [["embed", "layers.0"], ["layers.1", "head"]]
    assert cut_blocks(Pipelining(modules_per_stage=names), 2, config).ends == (1, 2)


def test_what_a_part_costs_is_measured():
    """A head of 1,024 times as many rows as the block is wide, beside a small block."""
    config = Llama3Config(dim=32, ffn_dim=32, n_layers=1, vocab_size=32768)
    kernels = choose({}, "cpu", 32)
    with without_storage():
        model = config.build(kernels)
    settings = TaskSettings(CrossEntropy(), kernels, Data(seq_len=32), config)
    task, cpu = LanguageModeling().build(settings), torch.device("cpu")
    before = torch.get_rng_state()
    embedding, block, head = part_seconds(model, task, task.example(4), config.layout.embed, cpu)
    assert 0 < embedding < head
    assert 0 < block < head
    assert torch.equal(torch.get_rng_state(), before), "the run draws what it would have drawn"


class Patches(Model):
    """Takes numbers in place of whole numbers that select rows of an embedding."""

    def __init__(self):
        super().__init__()
        self.embed, self.block, self.head = (nn.Linear(*each) for each in ((6, 8), (8, 8), (8, 3)))
        self.inputs = []

    def forward(self, x, *, hidden=None, positions=None, blocks=range(1), loss=None):
        if x is not None:
            self.inputs.append(x)
        hidden = self.embed(x) if hidden is None else hidden
        if 0 in blocks:
            hidden = self.block(hidden) + positions[..., None]
        return loss(self.head(hidden)) if loss else hidden


class Regression:
    """What a pipeline asks of a task, for pieces of images."""

    def input(self, batch):
        return batch

    def record(self, batch):
        return lambda outputs: outputs.square().sum()

    def loss_arguments(self, batch, record):
        return {"loss": record}


def test_a_task_whose_inputs_are_no_whole_numbers_is_measured():
    with without_storage():
        model = Patches()
    costs = part_seconds(model, Regression(), torch.zeros(4, 5, 6), "embed", torch.device("cpu"))
    assert all(cost > 0 for cost in costs)
    assert all(x.shape == (4, 5, 6) and x.std() > 0.1 for x in model.inputs)


def ends_where_rank_0_measured(recipe):
    """Return where this rank cuts; rank 0's clock says that the head is worth four blocks."""

    def timed(*arguments):
        assert torch.distributed.get_rank() == 0
        assert all(second > 0 for second in part_seconds(*arguments))
        return 0.5, 1.0, 4.0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "part_seconds", timed)
        parts = assembled(recipe)
    return parts.parallel_model.pipeline.cut.ends, parts.notes


def test_all_ranks_cut_where_rank_0_measured():
    """Four blocks and the embedding balance one block and the head."""
    recipe = recipe_with(
        model=BASE["model"] | {"n_layers": 5},
        parallel={"pipeline": 2, "pipelining": {"cost": "measured"}},
    )
    for ends, notes in run_ranks(2, ends_where_rank_0_measured, recipe):
        assert ends == (4, 5)
        assert "measured: embedding 500 ms, a block 1e+03 ms, head 4e+03 ms" in notes
