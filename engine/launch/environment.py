"""Which process of which job this is, read from what started it. Torch-free."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from ..core.errors import EnvironmentFault

STORE = "TRAINER_STORE"
ATTEMPT = "TRAINER_ATTEMPT"
TRACEBACK = "TRAINER_TRACEBACK"
"""set if errors are shown with tracebacks; ranks inherit it"""


@dataclass(frozen=True)
class World:
    """The place of this process among the processes of a job.

    Attributes:
        rank: number of this process among all.
        world_size: number of processes of the job.
        local_rank: number of this process among those of its machine.
        local_world_size: number of processes on this machine.
        node_rank: number of this machine.
        launcher: what started this process: "none", "trainer", "torchrun" or "slurm".
        rendezvous: where ranks find each other: a file's path, or `tcp://host:port`.
        launcher_serves_store: whether the launcher, not rank 0, serves the store there.
        attempt: restarts of the job so far; each attempt uses keys of its own in the store.
        note: what the user should know about the environment.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0
    launcher: str = "none"
    rendezvous: str = ""
    launcher_serves_store: bool = False
    attempt: int = 0
    note: str = ""

    def __post_init__(self) -> None:
        for name, index, size in (
            ("rank", self.rank, self.world_size),
            ("local rank", self.local_rank, self.local_world_size),
        ):
            if not 0 <= index < size:
                raise EnvironmentFault(
                    f"the environment says {name} {index} of {size} ({self.launcher})",
                    "ranks count from 0; start all processes with one launcher",
                )
        if self.local_world_size > self.world_size:
            raise EnvironmentFault(
                f"the environment says {self.local_world_size} processes on this machine "
                f"but {self.world_size} in all ({self.launcher})"
            )

    def divide(self, parts: int) -> World:
        """Return the place of this process in its part of a job, which is divided evenly.

        Args:
            parts: number of parts, each of consecutive ranks.
        """
        size = self.world_size // parts
        local = min(size, self.local_world_size)
        return replace(
            self,
            rank=self.rank % size,
            world_size=size,
            local_rank=self.local_rank % local,
            local_world_size=local,
        )


def find_world(environ: Mapping[str, str] = os.environ) -> World:
    """Read the world that our launcher, torchrun, Kubernetes or SLURM describes; else one rank.

    Raises:
        EnvironmentFault: environment variables are missing, malformed or contradictory.
    """
    # The most specific launcher first: ours and torchrun often run inside a SLURM job, whose
    # variables then describe the launcher and not the ranks.
    if STORE in environ:
        return replace(
            _torch_world(environ, "trainer"),
            rendezvous=environ[STORE],
            attempt=_number(environ, ATTEMPT),
        )
    if "RANK" in environ:
        return _from_torchrun(environ)
    if "SLURM_PROCID" in environ:
        return _from_slurm(environ)
    if environ.get("WORLD_SIZE", "1") != "1":
        raise EnvironmentFault(
            f"WORLD_SIZE is {environ['WORLD_SIZE']} but RANK is not set",
            "start with `trainer run --nproc N` or `torchrun`, or unset WORLD_SIZE",
        )
    return World()


def _from_torchrun(environ: Mapping[str, str]) -> World:
    """Read what torchrun and the Kubernetes training operator set (torch: `env://`)."""
    world = _torch_world(environ, "torchrun")
    address = ""
    if world.world_size > 1:
        port = _number(environ, "MASTER_PORT", 1, 2**16)
        address = f"tcp://{_word(environ, 'MASTER_ADDR')}:{port}"
    return replace(
        world,
        node_rank=_number(environ, "GROUP_RANK", default=0),
        rendezvous=address,
        launcher_serves_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        attempt=_number(environ, "TORCHELASTIC_RESTART_COUNT", default=0),
    )


def _torch_world(environ: Mapping[str, str], launcher: str) -> World:
    if "LOCAL_RANK" not in environ and "LOCAL_WORLD_SIZE" not in environ:
        local_rank, local_world_size = 0, 1  # a pod each
    else:
        local_rank = _number(environ, "LOCAL_RANK")
        local_world_size = _number(environ, "LOCAL_WORLD_SIZE", 1)
    return World(
        rank=_number(environ, "RANK"),
        world_size=_number(environ, "WORLD_SIZE", 1),
        local_rank=local_rank,
        local_world_size=local_world_size,
        launcher=launcher,
    )


def _from_slurm(environ: Mapping[str, str]) -> World:
    """Read the variables of `srun` (SLURM: srun, output environment variables)."""
    # A batch script has SLURM's variables too, but only srun starts a step, with all its tasks.
    if "SLURM_STEP_ID" not in environ:
        tasks = environ.get("SLURM_NTASKS", "1")
        note = (
            ""
            if tasks == "1"
            else (
                f"this SLURM job has {tasks} tasks, but only `srun trainer run ...` uses them all"
            )
        )
        return World(note=note)
    size_name = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    world_size = _number(environ, size_name, 1)
    node_rank = _number(environ, "SLURM_NODEID", default=0)
    tasks_name = "SLURM_STEP_TASKS_PER_NODE"
    counts = tasks_per_node(environ.get(tasks_name, str(world_size)))
    if node_rank >= len(counts) or sum(counts) != world_size:
        raise EnvironmentFault(
            f"{tasks_name} is {environ.get(tasks_name)!r}, but {size_name} is {world_size} "
            f"and SLURM_NODEID is {node_rank}"
        )
    address = ""
    if world_size > 1:
        nodes = "SLURM_STEP_NODELIST" if "SLURM_STEP_NODELIST" in environ else "SLURM_JOB_NODELIST"
        host = environ.get("MASTER_ADDR") or first_host(_word(environ, nodes))
        job = _number(environ, "SLURM_JOB_ID") + _number(environ, "SLURM_STEP_ID")
        # Each rank computes the same port without asking another; steps that share a machine mostly
        # get different ones.
        # Below 32768: from there on Linux hands out ports to other programs.
        port = _number(environ, "MASTER_PORT", 1, 2**16, default=10_000 + job % 20_000)
        address = f"tcp://{host}:{port}"
    return World(
        rank=_number(environ, "SLURM_PROCID"),
        world_size=world_size,
        local_rank=_number(environ, "SLURM_LOCALID"),
        local_world_size=counts[node_rank],
        node_rank=node_rank,
        launcher="slurm",
        rendezvous=address,
        attempt=_number(environ, "SLURM_RESTART_COUNT", default=0),
    )


@contextmanager
def flight_recorder(folder: Path) -> Iterator[None]:
    """Let NCCL record its collectives, and write them to `folder` when one fails or times out.

    It must be entered before the process group is created. Variables that are set stay.

    Source: torch/csrc/distributed/c10d/FlightRecorder.hpp, ProcessGroupNCCL.hpp (2.13).
    """
    dumps = str(folder.absolute() / "nccl-trace-rank-")  # NCCL appends the rank
    # Torch reads two names of some variables; a user may have set either.
    settings = {
        ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"): "2000",
        ("TORCH_NCCL_DUMP_ON_TIMEOUT",): "1",
        ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"): dumps,
    }
    ours = {
        names[0]: value
        for names, value in settings.items()
        if not any(name in os.environ for name in names)
    }
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name, None)


def first_host(nodes: str) -> str:
    """Return the first host of a SLURM list: `gpu[003-005,9],login1` gives `gpu003`."""
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", re.split(r",(?![^\[]*\])", nodes)[0])


def tasks_per_node(counts: str) -> list[int]:
    """Return SLURM's short form as a list: `4(x2),1` gives [4, 4, 1].

    Raises:
        EnvironmentFault: the text has another form.
    """
    tasks: list[int] = []
    for part in counts.split(","):
        match = re.fullmatch(r"(\d{1,6})(?:\(x(\d{1,6})\))?", part.strip())
        if not match:
            raise EnvironmentFault(f"SLURM_STEP_TASKS_PER_NODE is {counts!r}, not like `4(x2),1`")
        tasks += [int(match[1])] * int(match[2] or 1)
    return tasks


def _word(environ: Mapping[str, str], name: str) -> str:
    value = environ.get(name, "").strip()
    if not value:
        raise EnvironmentFault(
            f"{name} is not set, though this looks like one process of a job",
            "start all processes with one launcher: `trainer run --nproc N`, torchrun or srun",
        )
    return value


def _number(
    environ: Mapping[str, str],
    name: str,
    low: int = 0,
    end: int = 2**31,
    default: int | None = None,
) -> int:
    """Read a variable as a number from `low` up to but not including `end`."""
    if default is not None and not environ.get(name):
        return default
    value = _word(environ, name)
    if not re.fullmatch(r"[0-9]{1,10}", value) or not low <= int(value) < end:
        raise EnvironmentFault(f"{name} is {value!r}, not a number from {low} to {end - 1}")
    return int(value)
