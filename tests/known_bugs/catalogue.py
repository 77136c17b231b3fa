"""Mistakes that were reported against other trainers, each with a check that notices it here.

An entry is a check of our code, decorated with where the mistake was reported, what it was, and a
function that puts the same mistake into our code. The check must pass without the mistake, and must
raise AssertionError with it: a check that cannot fail is no check.

    python -m tests.known_bugs.catalogue   # writes docs/known-bugs.md
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import pytest

SUBJECTS = {
    "accumulation": "Gradient accumulation and the mean of the loss",
    "data_ranks": "Data parallel ranks: FSDP, DDP",
    "precision": "Mixed precision",
    "tensor_ranks": "Tensor and sequence parallel",
    "experts": "Experts and routers",
    "expert_ranks": "Expert parallel",
    "stages": "Pipelines and tied weights",
    "context_ranks": "Context parallel and ring attention",
    "updates": "Clipping, optimizers, schedules, averages",
    "resume": "Checkpoints and resuming",
    "data_order": "The order of data",
    "inputs": "Packing, masks, random numbers",
    "chats": "Conversations",
    "weights": "Saved, converted and merged weights, positions",
    "tasks": "Classification, distillation",
    "preferences": "Preferences and rewards",
}
"""module of this folder -> its heading in the documentation"""

PutIn = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True)
class KnownBug:
    """A mistake that somebody else's trainer made.

    Attributes:
        source: the repository and the number of the report, "owner/name#number".
        mistake: what went wrong there, in one sentence.
        check: asserts what the mistake would break.
        put_in: puts the mistake into our code.
        world: the ranks of the check; 1: all is in one process.
    """

    source: str
    mistake: str
    check: Callable[[], None]
    put_in: PutIn
    world: int

    @property
    def name(self) -> str:
        """The name of the check, which says what holds."""
        return self.check.__name__


_found: dict[str, dict[str, KnownBug]] = {subject: {} for subject in SUBJECTS}


def known_bug(
    source: str, mistake: str, put_in: PutIn, world: int = 1
) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Enter a check into the catalogue; see `KnownBug`."""

    def enter(check: Callable[[], None]) -> Callable[[], None]:
        subject = _found[check.__module__.rpartition(".")[2]]
        assert check.__name__ not in subject, check.__name__
        subject[check.__name__] = KnownBug(source, mistake, check, put_in, world)
        return check

    return enter


def read_catalogue() -> dict[str, list[KnownBug]]:
    """Return the entries of each subject."""
    for subject in SUBJECTS:
        import_module(f"tests.known_bugs.reports.{subject}")
    return {subject: list(_found[subject].values()) for subject in SUBJECTS}


@contextmanager
def mistaken(subject: str, name: str) -> Iterator[None]:
    """Put the mistake of an entry into our code, in this process."""
    import_module(f"tests.known_bugs.reports.{subject}")
    with pytest.MonkeyPatch.context() as patch:
        _found[subject][name].put_in(patch)
        yield


PAGE = """# Bugs that others had

Each of these mistakes was reported against a public trainer since 2024; most of them were silent:
training went on with wrong gradients, another order of data or other weights. For each there is a
test that puts the same mistake into this trainer's code and shows that a check of ours notices it.
`make test` runs those of one process, and the part `known bugs` of `make test-all` runs all.

{count} reports, by subject. The last column is the name of the check, below `tests/known_bugs/`.
"""


def write_page() -> str:
    """Return the page of the documentation that lists all entries."""
    catalogue = read_catalogue()
    lines = [PAGE.format(count=sum(map(len, catalogue.values())))]
    for subject, bugs in catalogue.items():
        lines += [
            f"## {SUBJECTS[subject]}\n",
            "| reported | what went wrong | check |",
            "|---|---|---|",
        ]
        lines += [
            f"| {bug.source.replace('#', ' ')} | {bug.mistake} | `{bug.name}` |" for bug in bugs
        ]
        lines.append("")
    return "\n".join(lines)


PAGE_FILE = Path(__file__).parents[2] / "docs" / "known-bugs.md"

if __name__ == "__main__":
    # As the module that the entries import: `__main__` would be a second catalogue.
    PAGE_FILE.write_text(import_module("tests.known_bugs.catalogue").write_page(), "utf-8")
