"""Rows exchanged between ranks, against lists of what each sent."""

import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from tests.cases import also
from tests.distributed import run_ranks
from tests.kernels.child import Child, needs_triton
from tests.kernels.compiled import compiled, on_each_triton
from tests.kernels.guarded import guards
from tests.kernels.interpreted import CHILD, interpreted
from trainer.kernels.all_to_all.exchange import Exchange, make_exchange
from trainer.kernels.all_to_all.symmetric import Buffers, header_words

WIDTH = 4
# splits[sender][receiver]: nothing to one rank, from one rank, to itself, and all to one.
UNEVEN = [[2, 0, 5], [0, 0, 0], [1, 3, 0]]
TO_ONE = [[0, 4, 0], [0, 1, 0], [0, 7, 0]]
NOTHING = [[0] * 3] * 3
CASES = pytest.mark.parametrize("splits", [UNEVEN, TO_ONE, NOTHING], ids=["uneven", "one", "none"])
MOST = 8
"""fewer rows than one rank of TO_ONE gets"""


def sent(splits, sender, extra=1):
    """Return a rank's rows: each names sender, receiver and number; behind them one for nobody."""
    rows = [
        [sender, receiver, number, 100 * sender + 10 * receiver + number]
        for receiver, count in enumerate(splits[sender])
        for number in range(count)
    ]
    return torch.tensor([*rows, *[[-1] * WIDTH] * extra], dtype=torch.float64)


def expected(splits, rank, max_rows):
    """Return what a rank receives."""
    rows = [
        [sender, rank, number, 100 * sender + 10 * rank + number]
        for sender, counts in enumerate(splits)
        for number in range(counts[rank])
    ]
    return torch.tensor([*rows, *[[0] * WIDTH] * max_rows][:max_rows], dtype=torch.float64)


def arrivals(splits, rank):
    """Return for each row that a rank sent to whom it went and where it lies there."""
    return [
        (receiver, sum(counts[receiver] for counts in splits[:rank]) + number)
        for receiver, count in enumerate(splits[rank])
        for number in range(count)
    ]


def check(exchange, splits, rank, max_rows):
    """Check one rank's part of an exchange and of its gradient; return x, out and what arrived."""
    x = sent(splits, rank).requires_grad_()
    out, received = exchange(x, torch.tensor(splits[rank]))
    assert received.tolist() == [counts[rank] for counts in splits]
    assert torch.equal(out, expected(splits, rank, max_rows))
    weights = 1000.0 * rank + torch.arange(max_rows, dtype=torch.float64)
    (grad,) = torch.autograd.grad(out, x, weights.unsqueeze(1).expand_as(out), retain_graph=True)
    places = arrivals(splits, rank)
    kept = torch.tensor([[place < max_rows] for _, place in places] + [[False]])
    of_place = torch.tensor([[1000.0 * receiver + place] for receiver, place in places] + [[0.0]])
    assert torch.equal(grad, (of_place * kept).double().expand(-1, WIDTH))
    return x, out, kept


def exchange_by_torch(splits, implementation):
    rank, group = dist.get_rank(), dist.group.WORLD
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        exchange = make_exchange(
            group,
            torch.device("cpu"),
            MOST,
            WIDTH,
            torch.float64,
            implementation=implementation,
        )
    for _ in range(2):
        x, out, kept = check(exchange, splits, rank, MOST)
    (grad,) = torch.autograd.grad(out.pow(3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(grad.pow(2).sum(), x)
    torch.testing.assert_close(second, 36 * x.detach() ** 3 * kept)
    return exchange.reason, [str(each.message) for each in said]


@CASES
def test_torch_exchanges_rows_and_gradients(splits):
    found = run_ranks(3, exchange_by_torch, splits, "auto")
    assert found == [("torch: fastest measured", [])] * 3


def test_torch_serves_where_symmetric_memory_is_missing_and_that_is_said():
    for reason, said in run_ranks(3, exchange_by_torch, UNEVEN, "symmetric"):
        assert reason == "torch: no symmetric memory: rank 0: GPUs have it, and this is a CPU"
        assert said == [f"rows are exchanged by torch's collectives: {reason[7:]}"]


def exchange_on_a_gpu_that_is_not_there(width):
    exchange = make_exchange(
        dist.group.WORLD,
        torch.device("cuda"),
        MOST,
        width,
        torch.bfloat16,
        implementation="symmetric",
    )
    return exchange.reason


@needs_triton
@pytest.mark.filterwarnings("ignore:rows are exchanged")
def test_ranks_agree_on_torch_where_buffers_cannot_be_made():
    # Rank 0 alone speaks, so that all give the same reason.
    uneven = run_ranks(2, exchange_on_a_gpu_that_is_not_there, 12)
    fault = "rank 0: rows of 24 bytes are no multiple of 16"
    assert uneven == [f"torch: no symmetric memory: {fault}"] * 2
    first, second = run_ranks(2, exchange_on_a_gpu_that_is_not_there, 16)
    assert first == second
    assert first.startswith("torch: no symmetric memory: rank 0: ")
    assert "Error: " in first


def refused():
    group, device = dist.group.WORLD, torch.device("cpu")
    with pytest.raises(ValueError, match="no exchange is named 'nvlink'; known: auto, torch"):
        make_exchange(group, device, 1, 1, torch.float32, implementation="nvlink")
    exchange = make_exchange(group, device, 1, 1, torch.float32)
    with pytest.raises(ValueError, match="2 rows, and room for 1: raise max_rows"):
        exchange(torch.ones(2, 1), torch.tensor([2, 0]))


def test_what_cannot_be_sent_is_refused():
    run_ranks(2, refused)


def shared(path, size, dtype):
    return torch.from_file(str(path), shared=True, size=size, dtype=dtype)


def exchange_by_triton(folder, cases, rank, programs):
    """Check one rank, whose buffer and signals are files that the other ranks use as well."""
    from trainer.kernels.all_to_all import triton

    triton.BLOCK = 16
    world = len(cases[0])
    words = header_words(world) + MOST * WIDTH
    buffers = [shared(folder / f"buffer{r}", words, torch.int64) for r in range(world)]
    signals = [shared(folder / f"signals{r}", programs * world, torch.int32) for r in range(world)]
    side = Buffers(
        buffers[rank],
        torch.tensor([each.data_ptr() for each in buffers]),
        torch.tensor([each.data_ptr() for each in signals]),
        rank,
        MOST,
        programs,
    )
    exchange = Exchange(side.exchange, MOST, "symmetric: a test")
    for splits in cases:
        with guards():
            check(exchange, splits, rank, MOST)
    return signals[rank].tolist()


@needs_triton
@pytest.mark.parametrize("programs", [3, *also(1)])
def test_one_rank_pulls_from_itself(tmp_path, programs):
    left = interpreted(exchange_by_triton, tmp_path, [[[5]], [[0]], [[7]]], 0, programs)
    assert left == [0] * programs


@pytest.mark.matrix
@pytest.mark.slow
@needs_triton
def test_ranks_pull_rows_and_gradients_from_each_other(tmp_path):
    """They run at the same time, meet in every launch and leave all signals at 0."""
    more = [Child(CHILD.env, CHILD.prepare) for _ in range(2)]
    cases = [UNEVEN, TO_ONE, NOTHING, UNEVEN]
    with ThreadPoolExecutor(3) as pool:
        calls = [
            pool.submit(child.call, exchange_by_triton, tmp_path, cases, rank, 2)
            for rank, child in enumerate([CHILD, *more])
        ]
        left = [call.result() for call in calls]
    for child in more:
        child.stop()
    assert left == [[0] * 6] * 3


def launch(world, counts):
    from trainer.kernels.all_to_all import triton

    addresses = torch.zeros(world, dtype=torch.int64)
    for rows in counts:
        triton.pull(rows, 4096 * 2 // 8, addresses, addresses, 1, 64)


@pytest.mark.matrix
@needs_triton
@on_each_triton
def test_a_pull_compiles_once_reads_16_bytes_at_a_time_and_spills_nothing(triton):
    (kernel,) = compiled(launch, 8, (1, 16, *range(1000, 1018)), triton=triton)
    assert kernel.spill_bytes == 0
    assert kernel.instructions["LDG128"] > 0
    assert kernel.instructions["ATOMG"] >= 4  # to send and to receive, before and after


@pytest.mark.matrix
@needs_triton
def test_any_number_of_ranks_compiles():
    for world in (1, 2, 6):
        (kernel,) = compiled(launch, world, (100,))
        assert kernel.spill_bytes == 0
