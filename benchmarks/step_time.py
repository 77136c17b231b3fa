"""CPU seconds of one optimizer step on one thread, ours beside bare torch and the peers.

Every baseline is a process; they take turns step by step, so that all see the same load. The
number to read is the ratio to the bare eager fp32 loop: its median over the rounds, or on a busy
machine the ratio of the two least times.

    python benchmarks/step_time.py --peers-python peers/bin/python --write
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import results
from baselines.turns import Baseline, BaselineError, take_turns
from baselines.workload import write_tokens

SCRIPTS = Path(__file__).parent / "baselines"
BASELINE = "bare fp32"


@dataclass(frozen=True)
class Entry:
    script: str
    options: tuple[str, ...] = ()
    package: str = "torch"
    """what its interpreter must have"""


ENTRIES = {
    BASELINE: Entry("bare.py"),
    "bare fp32 compiled": Entry("bare.py", ("--compile",)),
    "best known loop": Entry("bare.py", ("--best",)),
    "trainer fp32": Entry("ours.py", ("--compute", "fp32"), "trainer"),
    "trainer fp32 compiled": Entry("ours.py", ("--compute", "fp32", "--compile"), "trainer"),
    "trainer default": Entry("ours.py", (), "trainer"),
    "trainer bf16 compiled": Entry("ours.py", ("--compute", "bf16", "--compile"), "trainer"),
    "transformers default": Entry("transformers_trainer.py", (), "accelerate"),
    "transformers best": Entry("transformers_trainer.py", ("--best",), "accelerate"),
    "litgpt default": Entry("litgpt_pretrain.py", (), "litgpt"),
    "litgpt best": Entry("litgpt_pretrain.py", ("--best",), "litgpt"),
    "torchtitan default": Entry("torchtitan_train.py", (), "torchtitan"),
    "torchtitan best": Entry("torchtitan_train.py", ("--best",), "torchtitan"),
    "OLMo-core default": Entry("olmo_core_train.py", (), "olmo_core"),
    "OLMo-core best": Entry("olmo_core_train.py", ("--best",), "olmo_core"),
}

PROJECTS = {
    "transformers_trainer.py": "transformers",
    "litgpt_pretrain.py": "litgpt",
    "torchtitan_train.py": "torchtitan",
    "olmo_core_train.py": "ai2-olmo-core",
}
"""script -> the project on PyPI whose version is recorded beside torch's"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocab", type=int, action="append", help="default: 2048 and 32000")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument(
        "--only", action="append", metavar="TEXT", help="baselines whose name contains it"
    )
    parser.add_argument(
        "--at-once", type=int, default=6, help="processes beside the bare loop that take turns"
    )
    parser.add_argument(
        "--peers-python",
        action="append",
        default=[],
        metavar="PYTHON",
        help="interpreters that have transformers, litgpt, torchtitan, OLMo-core (repeat it)",
    )
    parser.add_argument("--write", action="store_true", help=f"append to {results.FOLDER.name}/")
    options = parser.parse_args()
    wanted = [
        name for name in ENTRIES if not options.only or any(text in name for text in options.only)
    ]
    pythons = {name: find_python(ENTRIES[name], options.peers_python) for name in wanted}
    for name in wanted:
        if pythons[name] is None:
            print(f"skipped {name}: no interpreter with {ENTRIES[name].package}")
    for vocab in options.vocab or (2048, 32000):
        rows = measure_all(vocab, pythons, options)
        print(f"\nvocabulary {vocab}: CPU seconds a step against {BASELINE}")
        print(show(rows))
        if options.write:
            rounds = {"vocab": vocab, "rounds": options.rounds, "baselines": rows}
            print(f"written to {results.append('step_time', rounds).name}")


def find_python(entry: Entry, peers: list[str]) -> str | None:
    """Return the first interpreter that has the entry's package.

    Peers run in the interpreters that were named for them, whatever this one has.
    """
    own = entry.package in ("torch", "trainer")
    for python in (sys.executable,) if own else (*peers, sys.executable):
        probe = f"import importlib.util as u, sys; sys.exit(u.find_spec({entry.package!r}) is None)"
        if subprocess.run([python, "-c", probe], cwd=SCRIPTS).returncode == 0:
            return python
    return None


def measure_all(
    vocab: int, pythons: dict[str, str | None], options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Measure in groups that fit into memory, each with the bare loop."""
    names = [name for name, python in pythons.items() if python and name != BASELINE]
    groups = [names[i : i + options.at_once] for i in range(0, len(names), options.at_once)] or [[]]
    rows: dict[str, dict[str, Any]] = {}
    for group in groups:
        entries = {name: ENTRIES[name] for name in (BASELINE, *group)}
        with tempfile.TemporaryDirectory() as folder:
            for row in measure(vocab, entries, pythons, Path(folder), options):
                rows.setdefault(row["name"], row)
    return list(rows.values())


def measure(
    vocab: int,
    entries: Mapping[str, Entry],
    pythons: Mapping[str, str | None],
    folder: Path,
    options: argparse.Namespace,
) -> list[dict[str, Any]]:
    """Let the entries take turns; ratios are to the first."""
    tokens = folder / "tokens.bin"
    write_tokens(tokens, vocab)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    running: list[Baseline] = []
    try:
        for name, entry in entries.items():
            home = folder / name.replace(" ", "_")
            home.mkdir()
            python = pythons.get(name) or sys.executable
            command = [python, str(SCRIPTS.resolve() / entry.script)]
            command += [f"--vocab={vocab}", f"--tokens={tokens}", *entry.options]
            baseline = Baseline(name, command, home / "log")
            try:
                baseline.start(environment)
            except BaselineError as failure:
                print(f"failed {failure}", file=sys.stderr)
                continue
            running.append(baseline)
        take_turns(running, warmup=options.warmup, rounds=options.rounds)
    finally:
        for baseline in running:
            baseline.stop()
    rows = [row(baseline, running[0]) for baseline in running]
    for found in rows:
        name = found["name"]
        python = pythons.get(name) or sys.executable
        found["versions"] = versions(python, PROJECTS.get(entries[name].script))
    return rows


def versions(python: str, project: str | None) -> dict[str, str]:
    """Return the versions of torch and of a project that are installed beside an interpreter."""
    names = ["torch", *([project] if project else [])]
    probe = "import importlib.metadata as m, json, sys; "
    probe += "print(json.dumps({name: m.version(name) for name in sys.argv[1:]}))"
    answer = subprocess.run([python, "-c", probe, *names], capture_output=True, check=True)
    found: dict[str, str] = json.loads(answer.stdout)
    return found


def row(measured: Baseline, reference: Baseline) -> dict[str, Any]:
    ratios = [mine / its for mine, its in zip(measured.cpu, reference.cpu, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return {
        "name": measured.name,
        "cpu_ms": round(statistics.median(measured.cpu) * 1e3, 1),
        "ratio": round(middle, 3),
        "ratio_of_least": round(min(measured.cpu) / min(reference.cpu), 3),
        "quartiles": [round(low, 3), round(high, 3)],
        "peak_mib": round(measured.peak_bytes / 2**20),
    }


def show(rows: list[dict[str, Any]]) -> str:
    heads = ["", "CPU ms", "ratio", "quartiles", "of least", "peak MiB"]
    lines = [
        [
            row["name"],
            f"{row['cpu_ms']:.0f}",
            f"{row['ratio']:.3f}",
            "{:.3f} - {:.3f}".format(*row["quartiles"]),
            f"{row['ratio_of_least']:.3f}",
            str(row["peak_mib"]),
        ]
        for row in rows
    ]
    return results.table(heads, lines)


if __name__ == "__main__":
    main()
