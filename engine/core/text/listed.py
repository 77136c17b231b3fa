"""Lists in messages: short, and safe for a terminal. Torch-free."""

from __future__ import annotations

MAX_SHOWN = 20


def listed(heading: str, problems: list[str]) -> str:
    """Return a heading with the first problems below it."""
    some = problems[:MAX_SHOWN]
    if len(problems) > len(some):
        some.append(f"and {len(problems) - len(some)} more")
    return "\n  ".join([heading, *some])


def shown(name: str) -> str:
    """Return a foreign name as it may be printed."""
    return name if name.isprintable() and 0 < len(name) <= 200 else repr(name[:200])
