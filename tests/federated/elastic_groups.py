"""Replica groups as processes of their own, beside a lighthouse of torchft in this one."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import urlopen

LIMIT_SECONDS = 240


class Groups:
    """Starts replica groups of a recipe, and waits for what they do.

    Args:
        folder: where the recipe `elastic.toml` is, and the runs will be.
        server: the lighthouse.
        words: further arguments of every group.
    """

    def __init__(self, folder: Path, server, *words: str):
        self.folder, self.words = folder, words
        # The server names this machine, whose name need not resolve.
        self.lighthouse = f"http://127.0.0.1:{urlsplit(server.address()).port}"
        self.processes, self.starts = {}, {}

    def start(self, number: int, *words: str, fault: str = "", nproc: int = 1):
        """Start a replica group; its output goes on in `groupN.log`."""
        environ = {name: x for name, x in os.environ.items() if name != "TRAINER_FAULT"}
        environ |= {"TORCHFT_LIGHTHOUSE": self.lighthouse, "REPLICA_GROUP_ID": str(number)}
        environ |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        environ |= {"TRAINER_FAULT": fault, "TRAINER_FAULT_MARKS": str(self.folder)}
        command = [sys.executable, "-P", "-m", "trainer", "run", "elastic.toml", *self.words]
        command += [*words, *["--nproc", str(nproc)] * (nproc > 1)]
        self.starts[number] = self.starts.get(number, 0) + 1
        with open(self.folder / f"group{number}.log", "ab") as log:
            self.processes[number] = subprocess.Popen(
                command, cwd=self.folder, env=environ, stdout=log, stderr=log
            )

    def finish(self, number: int) -> int:
        """Wait for the end of a group, and return its exit code."""
        return self.processes[number].wait(LIMIT_SECONDS)

    def log(self, number: int) -> str:
        """Return what a group has printed."""
        return (self.folder / f"group{number}.log").read_text()

    def wait(self, condition) -> None:
        """Wait until a condition is true."""
        end = time.monotonic() + LIMIT_SECONDS
        while not condition():
            assert time.monotonic() < end, [self.log(number) for number in self.processes]
            time.sleep(0.05)

    def is_held(self, number: int) -> bool:
        """Return whether a group waits in a step for `release`."""
        return (self.folder / f"train.step-{self.processes[number].pid}").exists()

    def is_known(self, number: int) -> bool:
        """Return whether the lighthouse has heard of the newest process of a group."""
        found = set(re.findall(rf"{number:05d}:[0-9a-f-]+", self._status()))
        return len(found) == self.starts[number]

    def num_asking(self) -> int:
        """Return how many groups wait for a quorum."""
        found = re.search(r"\[(\d+)/\d+ participants healthy\]", self._status())
        return int(found[1]) if found else 0

    def _status(self) -> str:
        """Return the page of the lighthouse."""
        with urlopen(f"{self.lighthouse}/status") as page:
            return page.read().decode()

    def release(self) -> None:
        """Let the groups continue that wait."""
        (self.folder / "release").touch()

    def stop(self) -> None:
        """End the processes that are left."""
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()
                process.wait()
