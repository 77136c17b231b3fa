from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from trainer.engine.core.errors import EnvironmentFault, ExitCode
from trainer.engine.core.extras import install_command
from trainer.engine.observe.tables import TensorBoard
from trainer.engine.observe.tensorboard import TensorBoardTracker

pytestmark = pytest.mark.usefixtures("event_files_in_order")
ROOT = Path(__file__).resolve().parents[2]


def log(folder: Path, resume_step: int, steps: range, loss: float) -> None:
    tracker = TensorBoardTracker(folder, resume_step)
    for step in steps:
        row = {"kind": "train", "step": step, "loss": loss, "mfu": None, "time": float(step)}
        tracker.log(row)
        if step % 2 == 0:
            tracker.log({**row, "kind": "eval"})
            tracker.log({**row, "kind": "eval", "split": "books", "loss": 2 * loss})
    tracker.close()


def scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    """Read with TensorBoard's own reader."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


def test_tensorboard_shows_each_step_once_after_a_resume(tmp_path: Path) -> None:
    log(tmp_path, 0, range(1, 6), loss=2.0)
    log(tmp_path, 3, range(4, 7), loss=1.0)
    expected = [(1, 2.0), (2, 2.0), (3, 2.0), (4, 1.0), (5, 1.0), (6, 1.0)]
    assert scalars(tmp_path, "train/loss") == expected
    assert scalars(tmp_path, "eval/loss") == expected[1::2]
    assert scalars(tmp_path, "eval/books/loss") == [
        (step, 2 * each) for step, each in expected[1::2]
    ]


def test_histograms_arrive_with_their_bins(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracker = TensorBoardTracker(tmp_path, 0)
    found = {"low": -1.0, "high": 3.0, "counts": [5, 0, 2, 1]}
    tracker.log({"kind": "train", "step": 7, "time": 7.0, "weight_histogram/embed": found})
    tracker.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    (event,) = events.Histograms("train/weight_histogram/embed")
    shown = event.histogram_value
    assert (event.step, shown.min, shown.max, shown.num) == (7, -1.0, 3.0, 8.0)
    assert shown.bucket_limit == [0.0, 1.0, 2.0, 3.0]
    assert shown.bucket == [5.0, 0.0, 2.0, 1.0]


def test_the_evaluation_at_the_resumed_step_stays(tmp_path: Path) -> None:
    log(tmp_path, 0, range(1, 5), loss=2.0)
    log(tmp_path, 4, range(5, 6), loss=1.0)
    assert scalars(tmp_path, "eval/loss") == [(2, 2.0), (4, 2.0)]


def test_an_evaluation_before_the_first_step_is_shown_once(tmp_path: Path) -> None:
    log(tmp_path, 0, range(3), loss=2.0)
    log(tmp_path, 0, range(2), loss=1.0)
    assert scalars(tmp_path, "eval/loss") == [(0, 1.0)]
    assert scalars(tmp_path, "train/loss") == [(0, 1.0), (1, 1.0)]


def test_a_missing_package_is_named_with_the_extra_that_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("tensorboard.compat.proto", "tensorboard"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(EnvironmentFault) as caught:
        TensorBoard().build(tmp_path, 0)
    assert caught.value.exit_code == ExitCode.ENVIRONMENT
    assert install_command("tensorboard") in caught.value.render()


def test_the_tracker_does_not_need_torch() -> None:
    code = (
        "import sys, tempfile; from pathlib import Path\n"
        "from trainer.engine.observe.tensorboard import TensorBoardTracker\n"
        "TensorBoardTracker(Path(tempfile.mkdtemp()), 0).close()\n"
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": str(ROOT / ".dev")}, check=True)
