"""Which cases of a test `make test` runs, and which `make test-all` alone."""

from collections.abc import Collection

import pytest


def also(*values: object) -> list[object]:
    """Return parameters of tests that `make test-all` runs, and `make test` does not.

    A tuple is the values of several arguments.
    """
    every = (value if isinstance(value, tuple) else (value,) for value in values)
    return [pytest.param(*value, marks=pytest.mark.matrix) for value in every]


def quick(names: Collection[str], *chosen: str) -> list[object]:
    """Return all names as parameters, of which `make test` runs the chosen ones."""
    assert set(chosen) <= set(names)
    return [name if name in chosen else also(name)[0] for name in names]
