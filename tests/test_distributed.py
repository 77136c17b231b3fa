"""The harness itself: values by rank, and failures that say what happened."""

from __future__ import annotations

import faulthandler
import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from .distributed import run_ranks, run_ranks_to_their_ends


def sum_of_ranks(offset: int) -> tuple[int, float]:
    total = torch.tensor([float(dist.get_rank() + offset)])
    dist.all_reduce(total)
    return dist.get_rank(), total.item()


def fail_on_rank_1() -> None:
    if dist.get_rank() == 1:
        raise ValueError("rank 1 has had enough")
    dist.barrier()


def die_on_rank_1() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def crash() -> None:
    faulthandler._sigsegv()  # type: ignore[attr-defined]  # what a bug in C++ does


def sleep_for_ever() -> None:
    time.sleep(1000)


def has_a_group() -> bool:
    return dist.is_initialized()


def test_values_come_back_by_rank() -> None:
    assert run_ranks(2, sum_of_ranks, 10) == [(0, 21.0), (1, 21.0)]


def test_one_rank_has_no_process_group() -> None:
    assert run_ranks(1, has_a_group) == [False]


def test_a_failure_shows_the_traceback_of_its_rank() -> None:
    with pytest.raises(AssertionError, match=r"(?s)rank 1 of 2:.*rank 1 has had enough"):
        run_ranks(2, fail_on_rank_1)


def test_a_killed_rank_is_told_from_its_survivor() -> None:
    survivor, killed = run_ranks_to_their_ends(2, die_on_rank_1, timeout=20)
    assert "SIGKILL" in killed.error
    assert killed.exit_code == -signal.SIGKILL
    assert survivor.exit_code == 1


def test_a_rank_that_crashes_says_where() -> None:
    with pytest.raises(AssertionError, match=r"(?s)SIGSEGV.*test_distributed.py.* in crash"):
        run_ranks(1, crash)


def test_a_hang_ends_at_the_time_limit() -> None:
    with pytest.raises(AssertionError, match="still running"):
        run_ranks(1, sleep_for_ever, timeout=1)
