import pytest

import tests.same_cases  # noqa: F401 - loads the profile
from tests.data.streams import WINDOW
from trainer.engine.data import windows


@pytest.fixture
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A short text has many windows."""
    monkeypatch.setattr(windows, "FIRST_WINDOW", WINDOW)
    monkeypatch.setattr(windows, "LARGEST_WINDOW", 2 * WINDOW)
    monkeypatch.setattr(windows, "ROWS_A_WINDOW", 1)
