"""Ranks that meet, part, lose each other and meet again, in real processes under our launcher."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from trainer.engine.core.errors import EnvironmentFault
from trainer.engine.launch.environment import World
from trainer.engine.launch.group import process_group

ROOT = Path(__file__).resolve().parents[2]

PARENT = """
import sys
from pathlib import Path
from trainer.engine.launch.local import launch
from trainer.engine.launch.failure import Restarts
command = [sys.executable, "-P", "-c", sys.argv[1]]
sys.exit(launch(command, 2, log_dir=Path(sys.argv[2]), restarts=Restarts(int(sys.argv[3]))))
"""

PRELUDE = """
import os, sys, time
import torch, torch.distributed as dist
from trainer.engine.launch.ending import end_process
from trainer.engine.launch.environment import find_world
from trainer.engine.launch.group import process_group
world = find_world()
cpu = torch.device("cpu")
def total(group):
    ones = torch.ones(())
    dist.all_reduce(ones, group=group)
    return int(ones)
"""

# As the command line ends: with the interpreter's teardown, 2 ranks of 96 aborted after their work.
ENDING = "\nend_process(0)\n"


def launch(
    code: str, folder: Path, restarts: int = 0, timeout: float = 60
) -> tuple[int, str, str, float]:
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", PARENT, PRELUDE + code + ENDING, folder, str(restarts)],
        env={**os.environ, "PYTHONPATH": ".dev"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    return done.returncode, done.stdout, done.stderr, time.monotonic() - started


def test_one_process_has_no_group() -> None:
    with process_group(World(), torch.device("cpu"), 10) as group:
        assert group is None
        assert not torch.distributed.is_initialized()


def test_ranks_meet_and_part_in_order(tmp_path: Path) -> None:
    """Rank 0 is slow to leave: rank 1 waits for it, and neither complains."""
    code = """
with process_group(world, cpu, 30) as group:
    print(total(group), flush=True)
    time.sleep(0.5 if world.rank == 0 else 0)
assert not dist.is_initialized()
"""
    code, out, err, _ = launch(code, tmp_path)
    assert (code, out, err) == (0, "2\n", "")
    assert (tmp_path / "rank-1.log").read_text() == "2\n"


def test_a_restarted_job_meets_again(tmp_path: Path) -> None:
    """Stale addresses of the dead attempt must not be tried (pytorch#135712)."""
    code = """
with process_group(world, cpu, 30) as group:
    print(world.attempt, total(group), flush=True)
    if world.attempt == 0 and world.rank == 1:
        os.kill(os.getpid(), 9)
    total(group)
"""
    code, out, err, _ = launch(code, tmp_path, restarts=1)
    assert code == 0
    assert out == "0 2\n1 2\n"
    assert err.count("killed by SIGKILL") == 1


@pytest.mark.matrix
def test_a_rank_that_never_comes_is_an_environment_fault(tmp_path: Path) -> None:
    code = """
from trainer.engine.core.errors import EnvironmentFault
if world.rank == 1:
    time.sleep(600)
try:
    with process_group(world, cpu, 2):
        pass
except EnvironmentFault as error:
    print(error.render())
    sys.exit(3)
"""
    code, out, _, seconds = launch(code, tmp_path)
    assert code == 3
    assert "rank 0 of 2 could not join the process group" in out
    assert seconds < 55, "the other sleeps for ten minutes"


def test_a_port_in_use_is_an_environment_fault() -> None:
    with socket.socket() as occupied:
        occupied.bind(("127.0.0.1", 0))
        occupied.listen()
        port = occupied.getsockname()[1]
        world = World(0, 2, 0, 2, 0, "torchrun", f"tcp://127.0.0.1:{port}")
        with pytest.raises(EnvironmentFault, match=f"127.0.0.1:{port}"):
            process_group(world, torch.device("cpu"), 2).__enter__()


@pytest.mark.matrix
def test_torchrun_jobs_are_joined_also_when_torchrun_restarts_them(tmp_path: Path) -> None:
    """Its agent keeps one store over all attempts."""
    script = tmp_path / "rank.py"
    script.write_text(
        PRELUDE
        + """
with process_group(world, cpu, 30) as group:
    total(group)
    if world.attempt == 0 and world.rank == 1:
        os.kill(os.getpid(), 9)
    text = f"{total(group)} {world.launcher} {world.local_rank} {world.attempt}"
    with open(f"{sys.argv[1]}/{world.rank}", "w") as file:
        file.write(text)
"""
        + ENDING
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    done = subprocess.run(
        [*command, "--max-restarts=1", script, tmp_path],
        env={**os.environ, "PYTHONPATH": str(ROOT / ".dev")},
        timeout=280,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == [
        "2 torchrun 0 1",
        "2 torchrun 1 1",
    ]


def test_a_lost_rank_is_told_in_a_sentence(tmp_path: Path) -> None:
    code = """
from trainer.engine.core.errors import TrainerError
try:
    with process_group(world, cpu, 30) as group:
        total(group)
        if world.rank == 1:
            os.kill(os.getpid(), 9)
        total(group)
except TrainerError as error:
    print(error.render())
    sys.exit(error.exit_code)
"""
    code, out, err, _ = launch(code, tmp_path)
    assert code == 1
    assert out.startswith("error: rank 0 lost contact with another rank: ")
    assert "rank 1 was killed by SIGKILL" in err
