"""Which rank a job's failure is put down to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trainer.engine.core.heartbeat import Beat, first_failure, furthest_behind
from trainer.engine.launch.failure import RankEnd, find_cause


def beat(rank: int, **values: Any) -> Beat:
    settled = {"step": 7, "phase": "backward", "progress": 100, "since": 1000.0, "written": 1010.0}
    identity = {"rank": rank, "attempt": 0, "pid": rank + 1, "host": "node", "interval": 1.0}
    return Beat(**{**identity, **settled, **values})


def end(rank: int, code: int, report: Beat | None = None) -> RankEnd:
    return RankEnd(rank, code, Path("logs") / f"rank-{rank}.log", 0, report)


LOST = {"ended": "lost contact", "reason": "LostContact: ..."}


def test_a_killed_rank_is_the_cause_whatever_code_the_survivor_ends_with() -> None:
    """Its own code was taken for the cause: 5, as if no checkpoint were intact."""
    ends = [end(0, 5), end(1, -9, beat(1))]
    cause = find_cause(ends, [beat(0, **LOST), beat(1)], whole_tail=False)
    assert (cause.rank, cause.code) == (1, 1)
    assert "rank 1 was killed by SIGKILL, last seen in step 7, backward" in cause.sentence


def test_the_first_error_is_the_cause_though_its_rank_ended_last() -> None:
    early = beat(2, ended="error", reason="OSError: disk", written=1001.0)
    late = beat(1, ended="error", reason="ValueError: odd", written=1002.0)
    ends = [end(0, 1, beat(0, **LOST)), end(1, 1, late), end(2, 1, early)]
    cause = find_cause(ends, [beat(0, **LOST), late, early], whole_tail=False)
    assert cause.rank == 2
    assert cause.sentence.endswith("OSError: disk")
    assert first_failure([late, early]) == early


def test_ranks_that_all_waited_are_not_blamed_for_the_one_that_hangs() -> None:
    waiting = beat(0, **LOST)
    cause = find_cause([end(0, 1, waiting)], [waiting, beat(1)], whole_tail=False)
    assert cause.code == 1
    assert cause.rank is None
    assert cause.sentence.startswith("the job hangs: rank 1 (process 2 on node) last seen in step")


def test_an_abort_by_nccl_points_at_the_rank_that_is_behind() -> None:
    cause = find_cause([end(0, -6, beat(0))], [beat(0), beat(1, progress=90)], whole_tail=False)
    assert "the furthest behind is rank 1" in cause.sentence


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"written": 1000.0}, "its reports have stopped: stopped, dead, or blocked as a whole"),
        ({"progress": 99, "phase": "data", "since": 1005.0}, "it has done less"),
        ({"since": 999.0}, "its last progress is older"),
    ],
)
def test_the_rank_that_the_others_wait_for_is_found(changes: dict[str, Any], why: str) -> None:
    beats = [beat(0), beat(1), beat(2, **changes), beat(3)]
    found = furthest_behind(beats)
    assert found is not None
    assert found.rank == 2, why


def test_ranks_that_ended_are_not_waited_for() -> None:
    done = beat(0, ended="done", progress=1)
    assert furthest_behind([done, beat(1)]) == beat(1)
    assert furthest_behind([done]) is None
