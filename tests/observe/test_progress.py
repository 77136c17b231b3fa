from __future__ import annotations

import io
import os
import pty
import re
import select
import subprocess
import sys
from pathlib import Path

from trainer.engine.observe.progress import LineProgress, LiveProgress, Progress, open_progress

ROOT = Path(__file__).resolve().parents[2]


def train_row(step: int, **more: object) -> dict[str, object]:
    return {
        "kind": "train",
        "step": step,
        "loss": 2.34567,
        "grad_norm": 0.987,
        "lr": 3e-4,
        "tokens": 4096,
        "tokens_per_second": 12345.6,
        "step_seconds": 0.5,
        "data_seconds": 0.05,
        "mfu": 0.412,
        "memory_bytes": 3 * 2**29,
        **more,
    }


def test_a_log_has_one_aligned_line_a_row() -> None:
    stream = io.StringIO()
    progress = LineProgress(stream)
    progress.start(0, 1000)
    for step, loss in ((1, 10.0), (1000, 0.012345)):
        progress.show(train_row(step, loss=loss, tokens_per_second=loss * 1000))
    numbers = {"loss": 2.5, "perplexity": 12.2, "accuracy": 0.75, "loss/a": 2.0}
    progress.show({"kind": "eval", "step": 1000, **numbers})
    progress.warn("disk is nearly full")
    first, one, last, evaluation, warning = stream.getvalue().splitlines()
    assert first == "training from step 1 to 1000"
    assert one.startswith("step    1/1000  loss 10 ")
    assert "mfu 41.2%  wait  10%  mem 1.50 GiB  eta 0:08:20" in one
    assert [m.start() for m in re.finditer("  [a-z]", one)] == [
        m.start() for m in re.finditer("  [a-z]", last)
    ]
    assert evaluation.split() == ["eval", "1000/1000", "loss", "2.5", "accuracy", "0.75"]
    assert warning == "warning: disk is nearly full"


def test_an_unknown_peak_shows_no_mfu() -> None:
    stream = io.StringIO()
    LineProgress(stream).show(train_row(1, mfu=None))
    assert "mfu" not in stream.getvalue()


def test_the_screen_fits_the_stream_and_the_rank() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    assert isinstance(open_progress(0, io.StringIO()), LineProgress)
    assert isinstance(open_progress(0, Terminal()), LiveProgress)
    assert type(open_progress(1, Terminal())) is Progress


TRAIN = """
import sys
from trainer.engine.observe.progress import open_progress
progress = open_progress(0)
progress.start(0, 20_000)
row = dict(kind="train", loss=1.0, tokens_per_second=1.0, step_seconds=1.0, data_seconds=0.0,
           mfu=None, memory_bytes=1)
for step in range(1, 20_001):
    progress.advance(step)
    if step % 10 == 0:
        progress.show({**row, "step": step})
progress.note("a [b]note[/b]")
progress.show({"kind": "eval", "step": 20_000, "loss": 2.5})
progress.close()
print("trained", "rich" in sys.modules, file=sys.stderr)
"""


def train(stdout: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", TRAIN],
        env={**os.environ, "PYTHONPATH": str(ROOT / ".dev"), "TERM": "xterm"},
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_reader_that_goes_away_does_not_end_the_run() -> None:
    """As in `trainer run recipe.toml | head -1`."""
    process = train(subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == "training from step 1 to 20000\n"
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == "trained False\n", "and no complaint of the interpreter's"
    assert process.wait(timeout=60) == 0


def read_terminal(controller: int) -> str:
    shown = b""
    while select.select([controller], [], [], 10)[0]:
        try:
            piece = os.read(controller, 65536)
        except OSError:
            break
        if not piece:
            break
        shown += piece
    return shown.decode()


def test_a_terminal_has_a_bar_and_gets_its_cursor_back() -> None:
    controller, terminal = pty.openpty()
    process = train(terminal)
    os.close(terminal)
    shown = read_terminal(controller)
    assert process.wait(timeout=60) == 0
    os.close(controller)
    assert "step 20000/20000" in shown
    assert "a [b]note[/b]" in shown, "messages are no markup"
    assert "eval 20000/20000  loss 2.5" in shown
    rows = re.findall(r"step (\d+)/20000  loss 1 ", shown)
    assert [int(step) for step in rows] == [*range(10, 20_001, 10)], "scrollback keeps all losses"
    assert shown.rfind("\x1b[?25h") > shown.rfind("\x1b[?25l"), "the cursor is shown"
    assert process.stderr is not None
    assert process.stderr.read() == "trained True\n"


def test_a_terminal_that_is_closed_does_not_end_the_run() -> None:
    controller, terminal = pty.openpty()
    process = train(terminal)
    os.close(terminal)
    os.read(controller, 1)
    os.close(controller)
    assert process.stderr is not None
    assert process.stderr.read() == "trained True\n"
    assert process.wait(timeout=60) == 0
