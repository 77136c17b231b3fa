"""A run's metrics as a pandas frame. pandas is optional, and imported here alone. Torch-free."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ..core.errors import DataError, EnvironmentFault
from ..core.files import require_path
from ..observe.metrics import read

if TYPE_CHECKING:
    import pandas


def load_metrics(run: str | Path) -> pandas.DataFrame:
    """Return the rows of a run's metrics.jsonl, in the order in which they were written.

    Args:
        run: the run directory; the run may still be training.

    Returns:
        a frame with a row for each row of metrics.jsonl and a column for each key: `kind`
        ("train", "eval", ...), `step`, and numbers, which are NaN in rows that lack the key. A
        resumed run has each step once.

    Raises:
        EnvironmentFault: pandas is not installed.
        DataError: the run has no metrics.jsonl that can be read.
    """
    require_path(run)
    try:
        import pandas
    except ImportError as error:
        raise EnvironmentFault(
            "load_metrics needs the package pandas", "install it: pip install pandas"
        ) from error
    path = Path(run) / "metrics.jsonl"
    try:
        return pandas.DataFrame.from_records(read(path))
    except OSError as error:
        raise DataError(
            f"{path} cannot be read: {error.strerror}", "give the directory of a run"
        ) from error
