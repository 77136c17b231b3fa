"""List, choose and run the parts of `make test-all`; needs neither torch nor pytest itself.

    python -m tests.rotation list            the parts, their minutes, what they run
    python -m tests.rotation run 3 faults    these parts, by number or name; `all`; `next`
    python -m tests.rotation advance         record where the last change ended

`tests/parts.toml` says which parts there are. `tests/rotation.toml` says at which commit the
last change ended, which part was the last to run for it, and the first of the 100 numbered cells
(`tests/cells`) of the present one: from these and from what git calls changed, the parts of the
present change follow, the same on every machine.
"""

import os
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PARTS = ROOT / "tests/parts.toml"
STATE = ROOT / "tests/rotation.toml"
CELLS, CELLS_A_CHANGE = 2000, 100
"""how many there are (`tests/cells`), and how many the rotation runs at a time"""
NO_TESTS = 5  # pytest's exit code where nothing was selected: a small folder cut into parts


@dataclass(frozen=True)
class Part:
    """A share of the tests that `make test` leaves out.

    Attributes:
        number: its place in the rotation, from 1.
        group: the group of `tests/parts.toml` that it belongs to.
        shard: (k, n): every n-th of the group's tests, from the k-th.
        paths: files and folders of tests.
        ignored: paths below them that other groups run.
        marker: pytest's `-m`.
        packages: a change below one of these, or of `paths`, selects the part.
        minutes: how long it takes on two quiet cores.
        env: environment variables of its processes.
    """

    number: int
    group: str
    shard: tuple[int, int]
    paths: tuple[str, ...]
    ignored: tuple[str, ...]
    marker: str
    packages: tuple[str, ...]
    minutes: float
    env: dict[str, str]

    @property
    def name(self) -> str:
        """The group, and which share of it where there are more."""
        k, n = self.shard
        return self.group if n == 1 else f"{self.group} {k}/{n}"

    def arguments(self) -> list[str]:
        """Return pytest's arguments."""
        k, n = self.shard
        shard = [] if n == 1 else [f"--shard={k}/{n}"]
        ignored = [f"--ignore={path}" for path in self.ignored]
        paths = [path for path in self.paths if (ROOT / path).exists()]
        return ["-m", self.marker, *shard, *ignored, *paths]


@dataclass(frozen=True)
class Budget:
    """Minutes on two quiet cores: of all that CI does, and of its shares."""

    total: float
    before: float
    changed: float
    further: int


def read_parts(path: Path = PARTS) -> tuple[list[Part], Budget]:
    """Read the table of parts, numbered in order."""
    table = tomllib.loads(path.read_text("utf-8"))
    groups = table["group"]
    parts: list[Part] = []
    for group in groups:
        marker = "not matrix" if group.get("tests") == "quick" else "matrix"
        others = [p for g in groups if g is not group and not g.get("tests") for p in g["paths"]]
        ignored = [
            path
            for path in others
            if any(path.startswith(f"{own}/") for own in group["paths"]) and marker == "matrix"
        ]
        for index, minutes in enumerate(group["minutes"]):
            parts.append(
                Part(
                    number=len(parts) + 1,
                    group=group["name"],
                    shard=(index + 1, len(group["minutes"])),
                    paths=tuple(group["paths"]),
                    ignored=tuple(ignored),
                    marker=marker,
                    packages=tuple(group["packages"]),
                    minutes=minutes,
                    env=group.get("env", {}),
                )
            )
    return parts, Budget(**table["budget"])


def is_below(path: str, folders: Sequence[str]) -> bool:
    """Tell whether a path is one of the folders or files, or below one."""
    return any(path == folder or path.startswith(f"{folder}/") for folder in folders)


def select(
    parts: Sequence[Part], budget: Budget, last: int, changed: Sequence[str] | None
) -> tuple[list[Part], list[Part]]:
    """Choose the parts of a change.

    Args:
        last: number of the last part that ran for the change before.
        changed: paths of the files that changed; None: unknown, so that all did.

    Returns:
        The parts whose packages changed, those with most changed files first, and then the
        further ones in order after `last`.
    """
    in_order = [parts[(last + offset) % len(parts)] for offset in range(len(parts))]
    relevance = {
        part.number: 1
        if changed is None
        else sum(
            is_below(path, (*part.packages, *part.paths))
            for path in changed
            if path != "tests/rotation.toml"  # each change updates it
        )
        for part in parts
    }
    chosen: list[Part] = []
    for part in sorted(in_order, key=lambda part: -relevance[part.number]):  # stable: ties in order
        if not relevance[part.number] or _minutes([*chosen, part]) > budget.changed:
            break
        chosen.append(part)
    while True:
        further = [part for part in in_order if part not in chosen][: budget.further]
        if not chosen or budget.before + _minutes([*chosen, *further]) <= budget.total:
            return chosen, further
        chosen.pop()


def _minutes(parts: Sequence[Part]) -> float:
    return sum(part.minutes for part in parts)


def find_changes(since: str, until: str | None = None) -> list[str] | None:
    """Return the files that differ from a commit, new ones too; None where git does not know it.

    Args:
        until: another commit; None: the files as they are now.
    """
    differing = _git("diff", "--name-only", since, *([until] if until else []), "--")
    if differing is None:
        return None
    untracked = None if until else _git("ls-files", "--others", "--exclude-standard")
    return [*differing.splitlines(), *(untracked or "").splitlines()]


def _git(*arguments: str) -> str | None:
    """Return what git prints; None where there is no git or it fails."""
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout if done.returncode == 0 else None


def choose_next(until: str | None = None) -> tuple[list[Part], list[Part], str]:
    """Return what to run for the present change, and why in words."""
    parts, budget = read_parts()
    state = tomllib.loads(STATE.read_text("utf-8"))
    changed = find_changes(state["commit"], until)
    chosen, further = select(parts, budget, state["part"], changed)
    count = "everything (git does not know it)" if changed is None else f"{len(changed)} files"
    return chosen, further, f"changed since {state['commit'][:12]}: {count}"


def run_next() -> int:
    """Run the parts whose packages changed and the next ones in order."""
    chosen, further, why = choose_next()
    _, budget = read_parts()
    print(why)
    for part in chosen:
        print(f"  part {part.number} ({part.name}): its packages changed, {part.minutes} min")
    for part in further:
        print(f"  part {part.number} ({part.name}): next in order, {part.minutes} min")
    minutes = budget.before + _minutes([*chosen, *further])
    print(f"with what ran before, {minutes:.0f} of {budget.total:.0f} minutes", flush=True)
    return run_parts([*chosen, *further])


def run_parts(parts: Sequence[Part]) -> int:
    """Run parts one after the other, and return 1 if any failed."""
    failed = []
    for part in parts:
        print(f"== part {part.number}: {part.name}, {part.minutes} min", flush=True)
        if not any((ROOT / path).exists() for path in part.paths):
            print("no tests yet")
            continue
        command = [sys.executable, "-m", "pytest", "-n", "2", "--dist", "worksteal"]
        started = time.monotonic()
        code = subprocess.run(
            [*command, *part.arguments()], cwd=ROOT, env=os.environ | part.env
        ).returncode
        print(f"== part {part.number}: {(time.monotonic() - started) / 60:.1f} min", flush=True)
        if code not in (0, NO_TESTS):
            failed.append(part)
    for part in failed:
        print(f"FAILED: part {part.number} ({part.name}): make test-part PART={part.number}")
    return 1 if failed else 0


def find_parts(words: Sequence[str]) -> list[Part]:
    """Return the parts that words name: numbers, groups, or `all`."""
    parts, _ = read_parts()
    found: list[Part] = []
    for word in words:
        named = [part for part in parts if word in ("all", str(part.number), part.group)]
        if not named:
            names = ", ".join(dict.fromkeys(part.group for part in parts))
            sys.exit(f"no part {word!r}: 1 to {len(parts)}, all, next, or one of: {names}")
        found += named
    return found


def show_parts() -> int:
    """Print one line for each part."""
    parts, _ = read_parts()
    for part in parts:
        env = "".join(f"{key}={value} " for key, value in part.env.items())
        print(f"{part.number:3} {part.name:22} {part.minutes:4} min  {env}{' '.join(part.paths)}")
    print(f"{_minutes(parts):.0f} minutes in all")
    return 0


def next_cells(first: int, ran: Sequence[Part]) -> int:
    """Return the first cell that the next change runs, after the parts of the one before."""
    was_run = any(part.group == "cells" for part in ran)
    return (first + CELLS_A_CHANGE * was_run) % CELLS


def advance() -> int:
    """Record the commit that is checked out, and the last part that ran for the change before."""
    commit = (_git("rev-parse", "HEAD") or "").strip()
    if not commit:
        sys.exit("git names no commit here")
    state = tomllib.loads(STATE.read_text("utf-8"))
    if state["commit"] == commit:
        print("this commit is recorded already")
        return 0
    chosen, further, why = choose_next(until=commit)
    note = STATE.read_text("utf-8").split("commit =")[0]
    cells = next_cells(state["cells"], [*chosen, *further])
    numbers = f"part = {further[-1].number}\ncells = {cells}\n"
    STATE.write_text(f'{note}commit = "{commit}"\n{numbers}', "utf-8")
    print(f"{why}\nthe parts after {further[-1].number} are next")
    return 0


def main(words: Sequence[str]) -> int:
    """Do what the command line says."""
    commands: dict[tuple[str, ...], Callable[[], int]] = {
        ("list",): show_parts,
        ("run", "next"): run_next,
        ("advance",): advance,
    }
    if tuple(words) in commands:
        return commands[tuple(words)]()
    if len(words) > 1 and words[0] == "run":
        return run_parts(find_parts(words[1:]))
    print(__doc__)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
