import pytest
from hypothesis import settings

from tests.data.streams import WINDOW
from trainer.engine.data import windows

# The same cases each time: a failure is then the code's, not the day's.
settings.register_profile("same_cases", derandomize=True, deadline=None, database=None)
settings.load_profile("same_cases")


@pytest.fixture
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A short text has many windows."""
    monkeypatch.setattr(windows, "FIRST_WINDOW", WINDOW)
    monkeypatch.setattr(windows, "LARGEST_WINDOW", 2 * WINDOW)
    monkeypatch.setattr(windows, "ROWS_A_WINDOW", 1)
