"""Runs whose ranks are killed, hang or fail: which rank is named, and what is in the logs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cases import also
from tests.train.processes import complaints, finish, start, write_recipe
from trainer.engine.core.heartbeat import Beat, read_beats
from trainer.engine.core.run_state import read_state

ROOT = Path(__file__).resolve().parents[2]
SMALL = [
    "run.steps=12",
    "evaluate.interval=6",
    "resilience.collective_timeout_seconds=60",
    "resilience.hang_timeout_seconds=3",
]


def command(recipe: Path, *options: str, **environ: str) -> subprocess.Popen[str]:
    """Start `trainer run` on two ranks."""
    words = ["run", str(recipe), "--nproc=2", *(f"--set={text}" for text in SMALL), *options]
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "trainer", *words],
        env={**os.environ, "PYTHONPATH": str(ROOT / ".dev"), **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def outcome(process: subprocess.Popen[str]) -> tuple[int, str]:
    _, errors = process.communicate(timeout=240)
    return process.returncode, errors


def beats(recipe: Path) -> list[Beat]:
    return read_beats(recipe.parent / "run" / "logs")


def log(recipe: Path, rank: int) -> str:
    return (recipe.parent / "run" / "logs" / f"rank-{rank}.log").read_text("utf-8")


@pytest.mark.parametrize(
    "fault",
    [
        "phase.forward:rank1:step5:stop",
        *also(
            "phase.data:rank1:step5:sleep300",
            "phase.data:rank0:step5:stop",
            "phase.evaluation:rank1:step6:stop",
            "checkpoint.before_write:rank1:step6:stop",
            "phase.optimizer:rank1:step5:block300",
        ),
    ],
)
@pytest.mark.matrix
def test_a_rank_that_hangs_is_named_by_whatever_ends_the_job(tmp_path: Path, fault: str) -> None:
    recipe = write_recipe(tmp_path / "hang")
    rank = 1 if "rank1" in fault else 0
    code, errors = outcome(command(recipe, "--set=checkpoint.mode=sync", TRAINER_FAULT=fault))
    assert code == 1
    assert f"trainer: the job hangs: rank {rank} (process " in errors
    state = read_state(recipe.parent / "run")
    assert state is not None
    assert state.reason.startswith(f"the job hangs: rank {rank} ")
    assert "no progress for 3 s in step" in log(recipe, 1 - rank)
    assert "in train" in log(recipe, 1 - rank), "the stacks of the rank that waited"
    if "stop" not in fault:  # a stopped process cannot write
        assert "in train" in log(recipe, rank)


@pytest.mark.matrix
@pytest.mark.parametrize(
    "point",
    [
        "phase.resume:rank1",
        "phase.resume:rank0",
        "phase.assemble:rank1",
        "phase.backward:rank1:step5",
        "phase.evaluation:rank0:step6",
        "checkpoint.before_write:rank1:step6",
    ],
)
def test_a_killed_rank_is_named_and_is_an_unforeseen_failure(tmp_path: Path, point: str) -> None:
    recipe = write_recipe(tmp_path / "killed")
    rank = 1 if "rank1" in point else 0
    code, errors = outcome(command(recipe, TRAINER_FAULT=f"{point}:kill"))
    assert code == 1
    assert f"trainer: rank {rank} was killed by SIGKILL" in errors
    found = read_state(recipe.parent / "run")
    assert found is not None
    assert found.reason.startswith(f"rank {rank} was killed by SIGKILL")


@pytest.mark.parametrize("options", [[], *also(["--traceback"])])
def test_an_unforeseen_error_leaves_its_traceback_and_names_its_rank(
    tmp_path: Path, options: list[str]
) -> None:
    recipe = write_recipe(tmp_path / "error")
    fault = "phase.backward:rank1:step5:raise"
    code, errors = outcome(command(recipe, *options, TRAINER_FAULT=fault))
    assert code == 1
    assert (
        "trainer: rank 1 ended with exit code 1, last seen in step 5, backward: Runtime" in errors
    )
    assert "error: unexpected RuntimeError: fault" in errors
    assert "the traceback is in" in errors
    assert ("in accumulate" in errors) == bool(options), "the traceback, where it is asked for"
    assert "RuntimeError in step 5, backward\nTraceback (most recent call last):" in log(recipe, 1)
    assert "in accumulate" in log(recipe, 1)


def environment_of_nccl() -> None:
    """Fail with the settings of the flight recorder, when the process group is made."""
    import torch.distributed as dist

    def init_process_group(*_: Any, **__: Any) -> None:
        raise AssertionError(json.dumps({k: v for k, v in os.environ.items() if "TORCH_" in k}))

    dist.init_process_group = init_process_group


def environment_of_nccl_as_the_user_has_set_it() -> None:
    os.environ["TORCH_NCCL_TRACE_BUFFER_SIZE"] = "7"
    environment_of_nccl()


@pytest.mark.parametrize(
    ("before", "size"),
    [
        (environment_of_nccl, '"TORCH_FR_BUFFER_SIZE": "2000"'),
        (environment_of_nccl_as_the_user_has_set_it, '"TORCH_NCCL_TRACE_BUFFER_SIZE": "7"'),
    ],
)
def test_the_flight_recorder_is_on_before_ranks_meet(
    tmp_path: Path, before: Callable[[], None], size: str
) -> None:
    recipe = write_recipe(tmp_path / "nccl")
    finish(start(recipe, 2, before=before))
    text, folder = log(recipe, 0), recipe.parent / "run" / "logs"
    assert f'"TORCH_FR_DUMP_TEMP_FILE": "{folder}/nccl-trace-rank-"' in text
    assert '"TORCH_NCCL_DUMP_ON_TIMEOUT": "1"' in text
    assert size in text
    assert text.count("_SIZE") == text.count(size)


def test_a_run_of_one_process_leaves_its_traceback_too(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path / "alone")
    finish(start(recipe, before=fail_in_the_first_step))
    assert "ZeroDivisionError in step 1, " in log(recipe, 0)
    (beat,) = beats(recipe)
    assert (beat.ended, beat.step) == ("error", 1)


def test_a_rank_that_lost_contact_names_the_one_that_failed_first(tmp_path: Path) -> None:
    """Also where another launcher started the ranks, which says nothing of that."""
    recipe = write_recipe(tmp_path / "two")
    assert finish(start(recipe, 2, before=fail_on_rank_1)) == [1, 1]
    told = complaints(recipe)
    assert "rank 0 lost contact with another rank" in told
    assert "hint: rank 1 failed first, last seen in step 1, " in told
    assert ": ZeroDivisionError: division by zero" in told


def fail_on_rank_1() -> None:
    if os.environ["RANK"] == "1":
        fail_in_the_first_step()


def fail_in_the_first_step() -> None:
    from trainer.engine.train.step import TrainStep

    TrainStep.accumulate = lambda *_, **__: 1 / 0  # type: ignore[method-assign]


@pytest.mark.parametrize("options", [["--nproc=1"], []])
def test_restarts_need_a_launcher(tmp_path: Path, options: list[str]) -> None:
    recipe = write_recipe(tmp_path / "one")
    process = command(recipe, *options, "--max-restarts=2", RANK="0", WORLD_SIZE="1")
    code, errors = outcome(process)
    assert code == 2
    assert "--max-restarts" in errors or "--nproc" in errors


@pytest.mark.matrix
def test_a_job_is_restarted_from_its_newest_checkpoint(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path / "restarted")
    process = command(recipe, "--max-restarts=1", "--set=run.steps=60", "--set=run.resume=never")
    killed = 0
    for after in (6, 24):  # progress in between: the count begins anew
        victim = None
        while victim is None:
            assert process.poll() is None
            time.sleep(0.02)
            found = (b.pid for b in beats(recipe) if b.rank == 1 and b.step > after)
            victim = next((pid for pid in found if pid != killed), None)
        os.kill(victim, signal.SIGKILL)
        killed = victim
    code, errors = outcome(process)
    assert code == 0, errors
    assert errors.count("starting the ranks again (1 of at most 1 times)") == 2


@pytest.mark.matrix
def test_a_job_that_fails_again_and_again_ends_with_the_cause(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path / "again")
    fault = "phase.forward:rank1:step5:raise"
    code, errors = outcome(
        command(recipe, "--max-restarts=2", "--set=checkpoint.mode=sync", TRAINER_FAULT=fault)
    )
    assert code == 1
    # Only the first attempt saved a checkpoint (step 3), so both restarts count against the limit.
    assert errors.count("starting the ranks again") == 2
    ended = "trainer: rank 1 ended with exit code 1, last seen in step 5, forward: RuntimeError: "
    assert errors.count(ended) == 3
