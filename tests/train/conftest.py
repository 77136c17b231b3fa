"""What one process does, computed once."""

import pytest

from tests.distributed import run_ranks
from tests.train.plans import curves, recipe_with


@pytest.fixture(scope="module")
def alone():
    """Return a function from changes of the recipe to the curves of one process."""
    known = {}

    def compute(**changes):
        key = repr(changes)
        if key not in known:
            known[key] = run_ranks(1, curves, recipe_with(**changes))[0]
        return known[key]

    return compute
