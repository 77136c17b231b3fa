"""The launcher with real processes. The ranks are scripts that start in milliseconds."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

PARENT = """
import sys
from pathlib import Path
from trainer.engine.launch.local import launch
from trainer.engine.launch.failure import Restarts
nproc, stop, restarts, folder, code, mark = sys.argv[1:]
command = [sys.executable, "-S", "-E", "-c", code, folder, mark]
sys.exit(launch(command, int(nproc), log_dir=Path(folder) / "logs",
                stop_timeout_seconds=float(stop), restarts=Restarts(int(restarts))))
"""

PRELUDE = """
import os, signal, sys, time
folder, rank = sys.argv[1], int(os.environ["RANK"])
def ready():
    open(f"{folder}/ready-{rank}", "w").close()
"""

# Saves for a moment when it is told to stop, and counts how often that is.
OBEDIENT = """
told = []
def stop(number, frame):
    told.append(number)
    open(f"{folder}/told-{rank}", "a").write(signal.Signals(number).name + "\\n")
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
    signal.signal(number, stop)
ready()
while not told:
    time.sleep(0.01)
time.sleep(float(os.environ.get("SAVE_SECONDS", 0.2)))
sys.exit(75)
"""


class Launched:
    """A launcher in a process of its own, and everything that it starts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mark = uuid.uuid4().hex
        self.process: subprocess.Popen[str]

    def start(
        self, nproc: int, code: str, stop: float = 20.0, restarts: int = 0, **env: str
    ) -> Launched:
        arguments = [str(nproc), str(stop), str(restarts), str(self.folder), PRELUDE + code]
        self.process = subprocess.Popen(
            [sys.executable, "-c", PARENT, *arguments, self.mark],
            env={**os.environ, "PYTHONPATH": str(ROOT / ".dev"), **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        return self

    def wait_ready(self, nproc: int) -> Launched:
        wait_until(lambda: len(list(self.folder.glob("ready-*"))) == nproc)
        return self

    def end(self, timeout: float = 120.0) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=timeout)
        return self.process.returncode, out, err

    def alive(self) -> list[int]:
        """Return the living processes that carry our mark; zombies have no command line."""
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                if self.mark.encode() in path.read_bytes():
                    found.append(int(path.parent.name))
            except OSError:
                continue
        return found


def wait_until(condition, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Launched]:
    launched = Launched(tmp_path)
    yield launched
    launched.process.kill()
    launched.process.communicate()
    for pid in launched.alive():
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ([0, 0], 0),
        ([75, 75], 75),
        ([0, 3], 3),
        ([5, 0], 5),
        ([6, 6], 6),
        ([1, 4], 4),  # the connection error that the data error of rank 1 causes
        ([9, 0], 9),
    ],
)
def test_the_job_ends_with_the_code_that_explains_most(
    job: Launched, codes: list[int], expected: int
) -> None:
    job.start(len(codes), f"sys.exit({codes}[rank])")
    assert job.end()[0] == expected
    assert job.alive() == []


def test_a_rank_that_is_killed_ends_the_job_as_an_unforeseen_failure(job: Launched) -> None:
    job.start(2, "ready()\nif rank: os.kill(os.getpid(), 9)\ntime.sleep(60)")
    code, _, err = job.end()
    assert code == 1
    assert "rank 1 was killed by SIGKILL" in err
    assert job.alive() == []


def test_a_failing_rank_ends_the_others_within_seconds(job: Launched) -> None:
    deaf = "for n in (1, 2, 15): signal.signal(n, signal.SIG_IGN)\nready()\n"
    started = time.monotonic()
    job.start(3, deaf + "if rank == 1: print('out of luck'); sys.exit(4)\ntime.sleep(600)")
    code, out, err = job.end()
    assert code == 4
    assert time.monotonic() - started < 120, "others sleep for ten minutes"
    assert "rank 1 ended with exit code 4" in err
    assert "out of luck" in err, "the end of the failing rank's log is shown"
    assert "out of luck" not in out
    assert job.alive() == []


def test_rank_0_has_the_terminal_and_the_others_have_logs(job: Launched) -> None:
    job.start(2, "print('I am', rank)\nprint('oh', rank, file=sys.stderr)")
    assert job.end() == (0, "I am 0\n", "oh 0\n")
    assert sorted((job.folder / "logs/rank-1.log").read_text().splitlines()) == ["I am 1", "oh 1"]


def test_ranks_get_the_environment_that_they_need(job: Launched) -> None:
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS"]
    job.start(1, f"print([os.environ[name] for name in {names}])", OMP_NUM_THREADS="3")
    assert job.end()[1] == "['0', '0', '1', '1', '3']\n"


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1"])
def test_a_signal_reaches_each_rank_once_and_saved_ranks_end_with_75(
    job: Launched, name: str
) -> None:
    job.start(2, OBEDIENT).wait_ready(2)
    job.process.send_signal(signal.Signals[name])
    time.sleep(0.01)  # a second one at once is an echo
    if name == "SIGINT":
        job.process.send_signal(signal.SIGINT)
    assert job.end()[0] == 75
    assert [(job.folder / f"told-{rank}").read_text() for rank in range(2)] == [f"{name}\n"] * 2


def test_a_second_interrupt_kills_at_once(job: Launched) -> None:
    job.start(2, OBEDIENT, SAVE_SECONDS="60").wait_ready(2)
    job.process.send_signal(signal.SIGINT)
    wait_until(lambda: len(list(job.folder.glob("told-*"))) == 2)
    time.sleep(0.15)
    started = time.monotonic()
    job.process.send_signal(signal.SIGINT)
    assert job.end()[0] == 130
    assert time.monotonic() - started < 30, "half of what a save takes here"
    assert job.alive() == []


def test_ranks_that_do_not_stop_in_time_are_killed(job: Launched) -> None:
    job.start(2, OBEDIENT, stop=0.5, SAVE_SECONDS="60").wait_ready(2)
    job.process.terminate()
    assert job.end()[0] == 130
    assert job.alive() == []


def test_a_termination_after_a_warning_is_passed_on(job: Launched) -> None:
    job.start(1, OBEDIENT, SAVE_SECONDS="1").wait_ready(1)
    job.process.send_signal(signal.SIGUSR1)
    wait_until((job.folder / "told-0").exists)
    job.process.terminate()
    assert job.end()[0] == 75
    assert (job.folder / "told-0").read_text() == "SIGUSR1\nSIGTERM\n"


def test_no_rank_outlives_a_killed_launcher(job: Launched) -> None:
    job.start(3, "ready()\ntime.sleep(60)").wait_ready(3)
    assert len(job.alive()) == 4
    job.process.kill()
    wait_until(lambda: job.alive() == [])


def test_what_a_rank_has_started_ends_with_it(job: Launched) -> None:
    worker = "[sys.executable, '-S', '-c', 'import time; time.sleep(60)', sys.argv[2]]"
    job.start(1, f"import subprocess\nprint(subprocess.Popen({worker}).pid)")
    code, out, _ = job.end()
    assert code == 0
    assert int(out) > 0
    wait_until(lambda: job.alive() == [])


def ends(process: subprocess.Popen[str], seconds: float) -> bool:
    """Return whether a process ends in time."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
    return process.poll() is not None


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_signals_in_the_first_instants_leave_no_orphans(tmp_path: Path, number: int) -> None:
    random.seed(number)
    jobs = [Launched(tmp_path / str(index)) for index in range(8)]
    for job in jobs:
        job.folder.mkdir()
        job.start(2, "ready()\ntime.sleep(60)")
        time.sleep(random.uniform(0, 0.5))
        job.process.send_signal(number)
    for job in jobs:
        # Python drops an interrupt that comes while a callback of its imports runs: press again.
        if number == signal.SIGINT and not ends(job.process, seconds=5):
            job.process.send_signal(number)
        job.end()
        wait_until(lambda job=job: job.alive() == [])


def test_a_job_is_started_again_as_often_as_allowed_and_meets_anew(job: Launched) -> None:
    code = """
attempt, store = int(os.environ["TRAINER_ATTEMPT"]), os.environ["TRAINER_STORE"]
if rank == 0:
    open(f"{folder}/store-{attempt}", "w").write(str(os.path.getsize(store)))
    open(store, "a").write("addresses of an attempt")
os.kill(os.getpid(), 11) if attempt < 2 and rank else None
"""
    job.start(2, code, restarts=5)
    assert job.end()[0] == 0
    sizes = [(job.folder / f"store-{attempt}").read_text() for attempt in range(3)]
    assert sizes == ["0"] * 3


def test_a_killed_launcher_leaves_no_files(job: Launched) -> None:
    (job.folder / "temporary").mkdir()
    job.start(2, "ready()\ntime.sleep(60)", TMPDIR=str(job.folder / "temporary")).wait_ready(2)
    job.process.kill()
    wait_until(lambda: job.alive() == [], seconds=5)
    assert list((job.folder / "temporary").iterdir()) == []


def test_foreseen_errors_are_not_tried_again(job: Launched) -> None:
    job.start(2, "ready(); print('once'); sys.exit(4)", restarts=5)
    assert job.end()[:2] == (4, "once\n")


def test_an_unwritable_log_folder_is_an_environment_fault(job: Launched) -> None:
    (job.folder / "logs").write_text("a file")
    job.start(2, "pass")
    assert "EnvironmentFault" in job.end()[2]


def test_ranks_find_the_package_where_the_launcher_found_it(job: Launched) -> None:
    """Here in the working directory, which `-P` keeps off the ranks' path."""
    code = (
        "import sys; from pathlib import Path\n"
        "from trainer.engine.launch.local import launch\n"
        "from trainer.engine.launch.child import trainer_command\n"
        "command = [*trainer_command([])[:2], '-c', 'import trainer; print(trainer.__version__)']\n"
        "sys.exit(launch(command, 1, log_dir=Path(sys.argv[1])))"
    )
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    job.process = subprocess.Popen(
        [sys.executable, "-c", code, job.folder],
        cwd=ROOT / ".dev",
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    code_and_output = job.end()
    assert code_and_output[0] == 0, code_and_output
    assert code_and_output[1].strip()
