"""Kills the server or a worker process of one federation of 16 clients, again and again.

Two worker processes train 16 clients with top-k compression and error feedback. At seeded moments
one of them or the server is killed (SIGKILL); a server that was killed is started again. The run
must end as one that was left alone, bit for bit: weights, outer momentum, the state of all clients,
and the rows of metrics.jsonl. Goodput is the share of the workers' time, from the start to the last
kill, whose training counts.

    python benchmarks/federated_kills.py --kills 200 --write

If anything differs, the folder with both runs is kept, and the first rows that differ are printed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

import results
import torch

from trainer.engine.checkpoint.manifest import read_manifest, verify
from trainer.engine.checkpoint.reader import read_tensors
from trainer.engine.checkpoint.retention import list_checkpoints

CLIENTS, PROCESSES, LOCAL_STEPS, KEPT = 16, 2, 4, 3
RECIPE = f"""\
[model]
dim = 32
n_layers = 1
n_heads = 2
n_kv_heads = 1
ffn_dim = 64
[data]
seq_len = 32
global_batch = 4
micro_batch = 4
[[data.sources]]
name = "synthetic"
[schedule]
name = "constant"
[precision]
compute = "fp32"
[checkpoint]
interval = 1
keep = {KEPT}
[evaluate]
interval = 40
steps = 1
[federation]
clients = {CLIENTS}
processes = {PROCESSES}
local_steps = {LOCAL_STEPS}
[federation.server]
name = "fednesterov"
[federation.compression]
name = "topk"
"""
STARTING_SECONDS = 3.0
"""about how long a server or a worker needs to start"""
DEADLINE_SECONDS = 300.0
"""without progress a run hangs"""
SHOWN = 5
"""differences of rows that are printed and kept in the results"""


@dataclass
class FederatedRun:
    """A run of `trainer federate run` in processes of its own.

    Attributes:
        folder: where the recipe is.
        name: name of the run.
        rounds: rounds of the run.
        server: the newest process of the server.
    """

    folder: Path
    name: str
    rounds: int
    server: subprocess.Popen[bytes] | None = None

    @property
    def path(self) -> Path:
        """The run directory."""
        return self.folder / "runs" / self.name

    def start(self) -> None:
        """Start the server, or start it again."""
        words = [sys.executable, "-P", "-m", "trainer", "federate", "run", "recipe.toml"]
        words += [f"--set=run.name={self.name}", f"--set=federation.rounds={self.rounds}"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with open(self.folder / f"{self.name}.log", "ab") as log:
            self.server = subprocess.Popen(
                words, cwd=self.folder, env=environment, stdout=log, stderr=log
            )

    def finish(self) -> int:
        """Wait for the end of the server, and return its exit code."""
        assert self.server is not None
        return self.server.wait()

    def count_rows(self) -> int:
        """Return the number of lines of metrics.jsonl."""
        metrics = self.path / "metrics.jsonl"
        return metrics.read_bytes().count(b"\n") if metrics.exists() else 0

    def wait_for_rows(self, count: int) -> None:
        """Wait until metrics.jsonl has so many more lines than now, or the server has ended."""
        target, deadline = self.count_rows() + count, time.monotonic() + DEADLINE_SECONDS
        assert self.server is not None
        while self.count_rows() < target and self.server.poll() is None:
            if time.monotonic() > deadline:
                raise SystemExit(f"no progress in {DEADLINE_SECONDS:.0f} s: {self.path}")
            time.sleep(0.01)

    def list_workers(self) -> list[int]:
        """Return the numbers of the worker processes."""
        assert self.server is not None
        found = []
        children = Path(f"/proc/{self.server.pid}/task/{self.server.pid}/children")
        for child in children.read_text().split():
            with suppress(OSError):  # it has ended meanwhile
                if b"federated.workers.worker" in Path(f"/proc/{child}/cmdline").read_bytes():
                    found.append(int(child))
        return sorted(found)

    def read_lines(self) -> list[str]:
        """Return the whole lines of metrics.jsonl: a kill may leave a part of one."""
        return (self.path / "metrics.jsonl").read_text().split("\n")[:-1]

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield the rows of metrics.jsonl without what depends on the machine or on deaths."""
        for line in self.read_lines():
            row = json.loads(line)
            left_out = {"time", "restarts", *(k for k in row if k.endswith(("second", "seconds")))}
            yield {key: row[key] for key in row.keys() - left_out}

    def sum_seconds(self) -> float:
        """Return the time of all training that counts."""
        rows = map(json.loads, self.read_lines())
        return float(sum(row["seconds"] for row in rows if row["kind"] == "client"))


def read_last(run: FederatedRun) -> dict[str, torch.Tensor]:
    """Return every tensor of the newest checkpoint of a run."""
    folder = list_checkpoints(run.path / "checkpoints")[-1]
    manifest = read_manifest(folder)
    tensors = {
        name: torch.empty(entry["shape"], dtype=getattr(torch, entry["dtype"]))
        for name, entry in manifest.tensors.items()
    }
    read_tensors(folder, manifest, tensors)
    return tensors


def find_damage(run: FederatedRun) -> list[str]:
    """Return what is wrong with the checkpoints that a run has on the disk."""
    folders = list_checkpoints(run.path / "checkpoints")
    return [f"{folder.name}: {text}" for folder in folders for text in verify(folder)]


def find_leftovers(run: FederatedRun) -> list[str]:
    """Return the names of files and folders that a finished run should not have."""
    complete = {"latest", *(each.name for each in list_checkpoints(run.path / "checkpoints"))}
    found = [each.name for each in (run.path / "checkpoints").iterdir()]
    temporary = [path.name for path in run.path.rglob("*") if path.name.endswith(".tmp")]
    return sorted({*found} - complete) + temporary


def find_differing_rows(
    whole: Sequence[dict[str, Any]], killed: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return the first rows that only one of the runs has, after both lists are aligned.

    Args:
        whole, killed: the rows of the run that was left alone, and of the one that was killed.
    """
    texts = [[json.dumps(row, sort_keys=True) for row in rows] for rows in (whole, killed)]
    changes = SequenceMatcher(None, *texts, autojunk=False).get_opcodes()
    return [
        {"line": a + 1, "whole": whole[a:b][:SHOWN], "killed": killed[c:d][:SHOWN]}
        for change, a, b, c, d in changes
        if change != "equal"
    ][:SHOWN]


def kill_at_random(run: FederatedRun, kills: int, seed: int, minutes: float) -> dict[str, Any]:
    """Train a run while it is killed so many times, or for so long; return what was damaged."""
    chance, counts, damage = random.Random(seed), {"server": 0, "worker": 0}, list[str]()
    begin = time.monotonic()
    run.start()
    assert run.server is not None
    while sum(counts.values()) < kills and time.monotonic() < begin + 60 * minutes:
        # Some kills come while processes start, some in a round, some while it is saved.
        rows, seconds = chance.choice([0, 1, 5, 15, 16, 17, 25]), chance.uniform(0, 0.1)
        if chance.random() < 0.2:
            seconds *= 10 * STARTING_SECONDS
        # The run must not end before the last kill.
        if run.count_rows() < run.rounds * (CLIENTS + 1) * sum(counts.values()) / (kills + 1):
            run.wait_for_rows(rows)
            time.sleep(seconds)
        if run.server.poll() is not None:
            damage.append(f"the server ended with code {run.server.returncode} before the kill")
            break
        victim = chance.choice([run.server.pid, *run.list_workers()])
        if victim != run.server.pid:
            os.kill(victim, signal.SIGKILL)
            while victim in run.list_workers():  # not killed twice
                time.sleep(0.005)
            counts["worker"] += 1
            continue
        run.server.kill()
        run.server.wait()
        counts["server"] += 1
        damage += find_damage(run)
        run.start()
        print(f"{counts}, {run.count_rows()} rows", flush=True)
    seconds = time.monotonic() - begin
    goodput = run.sum_seconds() / (PROCESSES * seconds)
    code = run.finish()
    damage += [f"the server ended with code {code}"] if code else []
    damage += find_damage(run) + find_leftovers(run)
    found = {f"killed_{name}s": count for name, count in counts.items()}
    found |= {"kills": sum(counts.values())}
    return {**found, "damage": damage, "storm_seconds": seconds, "goodput": goodput}


def measure(kills: int, folder: Path, seed: int = 0, minutes: float = 600) -> dict[str, Any]:
    """Return what kills do to a run, and its goodput beside that of a run that is left alone."""
    (folder / "recipe.toml").write_text(RECIPE)
    rounds = kills + 4
    whole, run = (FederatedRun(folder, name, rounds) for name in ("whole", "killed"))
    begin = time.monotonic()
    whole.start()
    if whole.finish():
        raise SystemExit((folder / "whole.log").read_text())
    undisturbed = time.monotonic() - begin
    storm = kill_at_random(run, kills, seed, minutes)
    seconds = time.monotonic() - begin - undisturbed
    one, other = read_last(whole), read_last(run)
    shared = one.keys() & other.keys()
    differing = [*(one.keys() ^ other.keys()), *(n for n in shared if not one[n].equal(other[n]))]
    differing_rows = find_differing_rows(list(whole.rows()), list(run.rows()))
    return {
        "clients": CLIENTS,
        "rounds": rounds,
        "local_steps": LOCAL_STEPS,
        **storm,
        "tensors": len(one),
        "differing_tensors": len(differing),
        "equal_rows": not differing_rows,
        **({"differing_rows": differing_rows} if differing_rows else {}),
        "seconds": seconds,
        "seconds_undisturbed": undisturbed,
        "seconds_lost_by_a_kill": (seconds - undisturbed) / max(storm["kills"], 1),
        "goodput_undisturbed": whole.sum_seconds() / (PROCESSES * undisturbed),
    }


def holds(measured: dict[str, Any]) -> bool:
    """Return whether the kills have changed nothing and damaged nothing."""
    is_same = measured["equal_rows"] and not measured["differing_tensors"]
    return is_same and not measured["damage"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--minutes", type=float, default=600, help="no kills after so long")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", action="store_true", help="append to benchmarks/results")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="federated-kills-"))
    print(f"both runs are in {folder}, and stay there if they differ", flush=True)
    measured = measure(options.kills, folder, options.seed, options.minutes)
    print(json.dumps(measured, indent=1))
    if is_same := holds(measured):
        shutil.rmtree(folder)
    if options.write:
        results.append("federated", {"what": "kills", **measured, "holds": is_same})
    return int(not is_same)


if __name__ == "__main__":
    raise SystemExit(main())
