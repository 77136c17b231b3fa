"""Worker processes: the same order, and clear errors when one fails."""

import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.data.test_dataset import opened, rows_of, table
from trainer.engine.core.errors import DataError
from trainer.engine.data.loader import Loader
from trainer.engine.data.packing import PACKINGS, PackedRows
from trainer.engine.data.workers import prefetch_steps


def numbered(step: int) -> PackedRows:
    tokens = np.full((1, 4), step)
    return PackedRows(tokens, tokens)


def pids_of(step: int) -> PackedRows:
    tokens = np.full((1, 1), os.getpid())
    return PackedRows(tokens, tokens)


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("workers", [1, 2])
def test_workers_do_not_change_the_order(packing: str, workers: int) -> None:
    steps = {}
    for count in (0, workers):
        data = table(packing, workers=count)
        with closing(Loader(opened(data).train, data, 1, 2).steps(3)) as batches:
            steps[count] = [rows_of(step) for step in islice(batches, 7)]
    assert steps[0] == steps[workers]


def test_workers_leave_the_random_state_alone() -> None:
    torch.manual_seed(0)
    before = torch.random.get_rng_state()
    with closing(prefetch_steps(numbered, 5, 2, 60)) as batches:
        assert [int(batch.tokens[0, 0]) for batch in islice(batches, 6)] == [5, 6, 7, 8, 9, 10]
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_worker_does_not_end_what_the_training_process_has_left(tmp_path: Path) -> None:
    class Left:
        def __init__(self) -> None:
            self.itself = self  # only the garbage collector finds it

        def __del__(self) -> None:
            (tmp_path / str(os.getpid())).touch()

    def collect(step: int) -> PackedRows:
        gc.collect()
        return numbered(step)

    gc.disable()
    try:
        Left()
        with closing(prefetch_steps(collect, 0, 1, 60)) as batches:
            next(batches)
        assert list(tmp_path.iterdir()) == []
    finally:
        gc.enable()
    gc.collect()
    assert [path.name for path in tmp_path.iterdir()] == [str(os.getpid())]


def test_an_error_in_a_worker_names_worker_and_step() -> None:
    def fails_at_seven(step: int) -> PackedRows:
        if step == 7:
            raise ValueError("bad row")
        return numbered(step)

    with (
        closing(prefetch_steps(fails_at_seven, 4, 2, 60)) as batches,
        pytest.raises(DataError, match="step 7: data worker 1: ValueError: bad row"),
    ):
        list(islice(batches, 10))


def test_a_killed_worker_is_an_error_and_not_a_hang() -> None:
    def dies_at_six(step: int) -> PackedRows:
        if step == 6:
            os.kill(os.getpid(), signal.SIGKILL)
        return numbered(step)

    started = time.monotonic()
    with (
        closing(prefetch_steps(dies_at_six, 4, 2, 60)) as batches,
        pytest.raises(DataError, match=r"step [456]: a data worker died"),
    ):
        list(islice(batches, 10))
    assert time.monotonic() - started < 50, "a hang takes 60 s"


def test_a_hung_worker_is_an_error_after_the_timeout_and_is_ended() -> None:
    workers = []

    def hangs_at_one(step: int) -> PackedRows:
        if step == 1:
            time.sleep(1000)
        return pids_of(step)

    with (
        closing(prefetch_steps(hangs_at_one, 0, 1, 1)) as batches,
        pytest.raises(DataError, match=r"step 1: data worker 0 gave no batch in 1 s"),
    ):
        workers.extend(int(batch.tokens[0, 0]) for batch in islice(batches, 2))
    wait_until(lambda: not alive(workers[0]))


def test_workers_ignore_the_signals_of_a_stopping_job() -> None:
    with closing(prefetch_steps(pids_of, 0, 2, 60)) as batches:
        pids = {int(batch.tokens[0, 0]) for batch in islice(batches, 4)}
        for pid in pids:
            os.kill(pid, signal.SIGTERM)
            os.kill(pid, signal.SIGINT)
        assert {int(batch.tokens[0, 0]) for batch in islice(batches, 10)} == pids
    wait_until(lambda: not any(map(alive, pids)))


PARENT = """
import os, signal, sys
from tests.data.test_loader import pids_of
from trainer.engine.data.workers import prefetch_steps
batches = prefetch_steps(pids_of, 0, 2, 60)
print(*(int(next(batches).tokens[0, 0]) for _ in range(2)), flush=True)
"""


@pytest.mark.parametrize(
    ("last_line", "code"),
    [("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL), ("sys.exit(3)", 3)],
)
def test_workers_end_with_their_parent(last_line: str, code: int) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run(
        [sys.executable, "-c", PARENT + last_line],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (result.returncode, result.stderr) == (code, "")
    pids = [int(pid) for pid in result.stdout.split()]
    assert len(pids) == 2
    wait_until(lambda: not any(map(alive, pids)))


def test_the_run_imports_no_worker_code_without_workers() -> None:
    data = table()
    script = (
        "import sys; import trainer.engine.data.loader, trainer.engine.data.dataset;"
        "print([name for name in sys.modules if name.startswith(('torchdata', 'tokenizers'))])"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    assert data.workers == 0
    assert result.stdout.strip() == "[]"


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition: Callable[[], bool], seconds: float = 60) -> None:
    for _ in times(seconds):
        if condition():
            return
    raise AssertionError("it did not happen")


def times(seconds: float) -> Iterator[None]:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        yield
        time.sleep(0.02)
