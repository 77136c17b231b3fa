"""When the ranks of a pipeline do what."""

import re
from collections import Counter

import pytest
import torch
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops
from torch.distributed.pipelining.schedules import get_schedule_class

from trainer.engine.parallel.pipeline.grid import (
    Action,
    Deadlock,
    bubble_fraction,
    parse,
    schedule_grid,
    spans,
    split_backward,
)

VIRTUAL = [
    "Interleaved1F1B",
    "LoopedBFS",
    "InterleavedZeroBubble",
    "ZBVZeroBubble",
    "DualPipeV",
]


def order(grid):
    return [[cell for cell in row if cell] for row in grid]


class Recording:
    """A stage that torch's schedules run, and that notes what they ask of it."""

    is_first = is_last = False

    def __init__(self, number, stages):
        self.stage_index, self.num_stages, self.asked = number, stages, []

    def forward_one_chunk(self, m, *_, **__):
        self.asked.append(f"{self.stage_index}F{m}")

    def backward_one_chunk(self, m, **_):
        self.asked.append(f"{self.stage_index}B{m}")

    def clear_runtime_states(self):
        pass

    def perform_reduce_grad(self, _):
        pass

    def release_fwd_send_outputs(self, _):
        pass

    def no_messages(self, _):
        return []

    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = no_messages


def run_by_torch(schedule, rank, ranks, micro_batches, monkeypatch):
    """Return what torch does, which is not what its own drawing of 1F1B shows."""
    kind = get_schedule_class(schedule)
    monkeypatch.setattr(kind, "_initialize_stage", lambda *_: None)
    stage = Recording(rank, ranks)
    kind(stage, micro_batches).step(torch.zeros(micro_batches, 1))
    return stage.asked


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 2), (2, 5), (4, 4), (4, 11), (1, 3)])
def test_what_is_computed_here_is_what_torch_does(schedule, ranks, micro_batches, monkeypatch):
    ours = order(schedule_grid(schedule, ranks, ranks, micro_batches))
    for rank in range(ranks):
        assert ours[rank] == run_by_torch(schedule, rank, ranks, micro_batches, monkeypatch)


@pytest.mark.parametrize("schedule", VIRTUAL)
@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 4), (4, 8), (4, 12)])
def test_every_pass_happens_once_and_as_torch_orders_them(schedule, ranks, micro_batches):
    grid = schedule_grid(schedule, ranks, 2 * ranks, micro_batches)
    done = Counter(
        half for row in order(grid) for cell in row for half in split_backward(parse(cell))
    )
    assert set(done.values()) == {1}
    assert done.keys() == {
        Action(stage, kind, m)
        for stage in range(2 * ranks)
        for kind in "FIW"
        for m in range(micro_batches)
    }
    theirs = get_schedule_ops(schedule, ranks, micro_batches, 2)
    for row, actions in zip(order(grid), theirs, strict=True):
        assert row == re.findall(r"\d+[FBIW]\d+", " ".join(map(str, filter(None, actions))))


def test_idle_cells_stand_where_a_rank_waits():
    assert schedule_grid("GPipe", 2, 2, 2) == [
        ["0F0", "0F1", None, None, "0B0", "0B1"],
        [None, "1F0", "1F1", "1B0", "1B1"],
    ]


@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 4), (4, 8), (4, 16), (8, 32)])
def test_the_bubbles_are_those_that_papers_give(ranks, micro_batches):
    """1F1B and GPipe wait p - 1 turns; v stages a rank make turns shorter (arXiv:2104.04473,
    section 2.2); without dependence on weight gradients hardly any are left (arXiv:2401.10241)."""
    p, m = ranks, micro_batches
    for schedule in ("GPipe", "1F1B"):
        found = bubble_fraction(schedule_grid(schedule, p, p, m))
        assert found == pytest.approx((p - 1) / (m + p - 1))
    for v in (2, 3):
        found = bubble_fraction(schedule_grid("Interleaved1F1B", p, v * p, m))
        assert found == pytest.approx((p - 1) / (v * m + p - 1))
    interleaved = bubble_fraction(schedule_grid("Interleaved1F1B", p, 2 * p, m))
    for schedule in ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"):
        assert bubble_fraction(schedule_grid(schedule, p, 2 * p, m)) < interleaved / 2


def test_an_expensive_stage_makes_the_others_wait():
    """Two stages, the second twice as long: each micro batch but the last costs 2 + 4."""
    grid = schedule_grid("GPipe", 2, 2, 3)
    rows = spans(grid, [1.0, 2.0])
    assert rows[1][-1].end == 1 + 3 * (2 + 4)
    assert rows[0][-1].end == rows[1][-1].end + 2
    assert bubble_fraction(grid, [1.0, 2.0]) == pytest.approx(1 - (9 + 18) / (2 * 21))


def test_ranks_that_wait_for_each_other_are_found():
    with pytest.raises(Deadlock) as error:
        spans([["0F0", "0B0", "0F1", "0B1"], ["1F1", "1F0", "1B0", "1B1"]])
    assert error.value.waiting == {0: 1, 1: 0}


@pytest.mark.parametrize("cell", ["", "0", "F0", "0F", "0X1", "0F0 ", "-1F0", "٣F0", "0SEND_F0"])
def test_what_is_no_pass_of_a_micro_batch_is_not_read(cell):
    assert parse(cell) is None
