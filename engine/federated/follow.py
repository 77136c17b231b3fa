"""What a federation is doing, from the files of its run; and how it is stopped. Torch-free."""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core.errors import EnvironmentFault, RecipeError
from ..core.files import read_regular
from ..core.run_dir import LARGEST_LOCK, RunDirectory
from ..observe.metrics import read

POLL_SECONDS = 0.2


@dataclass(frozen=True)
class FederationStatus:
    """The newest round, and each client's newest part in one.

    Attributes:
        round: the row of the newest round; empty before the first.
        clients: the newest row of each client, by name.
        rounds_of: in how many rounds each client has trained.
        bytes_sent: from clients to the server, over all rounds.
        bytes_received: from the server to clients, over all rounds.
    """

    round: dict[str, Any]
    clients: dict[str, dict[str, Any]]
    rounds_of: dict[str, int]
    bytes_sent: int
    bytes_received: int


def read_status(run: Path) -> FederationStatus:
    """Read the rows of a federation's metrics.

    Raises:
        RecipeError: the run is no federation, or has no round yet.
    """
    newest: dict[str, Any] = {}
    clients: dict[str, dict[str, Any]] = {}
    counts: dict[str, int] = {}
    sent = received = 0
    file = RunDirectory(run).metrics
    for row in read(file) if file.is_file() else ():
        if row.get("kind") == "round":
            newest = dict(row)
            sent, received = sent + row["bytes_sent"], received + row["bytes_received"]
        elif row.get("kind") == "client":
            clients[row["client"]] = dict(row)
            counts[row["client"]] = counts.get(row["client"], 0) + 1
    if not clients:
        raise RecipeError(f"{run} has no round of a federation yet", "see `trainer status`")
    return FederationStatus(newest, clients, counts, sent, received)


def stop_run(run: Path, timeout_seconds: float) -> bool:
    """Ask the process of a run to stop between two rounds, and wait until it has ended.

    Args:
        run: the run directory.
        timeout_seconds: how long to wait.

    Returns:
        False if the run was not running.

    Raises:
        EnvironmentFault: it runs on another machine, or has not ended in time.
    """
    directory = RunDirectory(run)
    if not directory.holder():
        return False
    holder = json.loads(read_regular(run / ".lock", LARGEST_LOCK))
    if holder["host"] != os.uname().nodename:
        message = f"{run} runs on {holder['host']}"
        raise EnvironmentFault(message, "run the same command there")
    os.kill(int(holder["pid"]), signal.SIGTERM)
    end = time.monotonic() + timeout_seconds
    while directory.holder():
        if time.monotonic() > end:
            message = f"{directory.holder()} has not stopped in {timeout_seconds:g} s"
            raise EnvironmentFault(message, "it ends with its round; wait longer with --timeout")
        time.sleep(POLL_SECONDS)
    return True
