"""What one process does, computed once."""

import pytest

from tests.train.plans import by_one_process, curves


@pytest.fixture(scope="module")
def alone():
    """Return a function from changes of the recipe to the curves of one process."""
    return by_one_process(curves)
