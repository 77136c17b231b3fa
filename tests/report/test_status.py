"""`trainer status` and `trainer report` at the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.report.folders import hundred_steps, make_run, train_row
from trainer.cli import main as cli
from trainer.cli.status import sparkline
from trainer.engine.checkpoint.manifest import Manifest, write_manifest
from trainer.engine.core.heartbeat import BeatFile, heartbeat
from trainer.engine.core.run_dir import RunDirectory
from trainer.engine.core.run_state import RunState, read_state, record_attempt
from trainer.engine.report.status import TAIL_BYTES, examine

ROOT = Path(__file__).resolve().parents[2]
Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Command:
    """Run a command line in this process; return exit code, output and errors."""
    monkeypatch.chdir(tmp_path)

    def command(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stop:
            cli.main(arguments)
        assert isinstance(stop.value.code, int)
        return (int(stop.value.code), *capsys.readouterr())

    return command


def save_checkpoint(run: Path, step: int) -> None:
    folder = run / "checkpoints" / f"step-{step:08d}"
    folder.mkdir(parents=True)
    write_manifest(folder, Manifest(step=step, tensors={}, files={}, saved_at="now"))


def states(tmp_path: Path) -> dict[str, Path]:
    made = {
        "finished": make_run(tmp_path / "finished", hundred_steps(), state={"outcome": "finished"}),
        "stopped": make_run(
            tmp_path / "stopped", hundred_steps()[:9], state={"outcome": "stopped", "attempt": 2}
        ),
        "failed": make_run(
            tmp_path / "failed", hundred_steps()[:9], state={"outcome": "failed", "reason": "disk"}
        ),
        "died": make_run(tmp_path / "died", hundred_steps()[:9], state={}),
    }
    save_checkpoint(made["stopped"], 63)
    return made


def test_a_dead_run_is_told_by_how_it_ended(command: Command, tmp_path: Path) -> None:
    for state, path in states(tmp_path).items():
        code, out, _ = command("status", str(path), "--json")
        assert code == 0, "looking at a dead run is no failure"
        found = json.loads(out)
        assert found["state"] == state
        assert found["total_steps"] == 100
        assert found["holder"] == ""
        assert found["eta_seconds"] is None
    assert (found["step"], found["eval_step"], found["checkpoint_step"]) == (60, 60, None)
    assert found["tokens_per_second"] == 1000
    stopped = json.loads(command("status", "stopped", "--json")[1])
    assert (stopped["step"], stopped["checkpoint_step"], stopped["attempts"]) == (63, 63, 3)
    assert command("status", "failed")[1].splitlines()[1].split() == ["state", "failed:", "disk"]


def test_several_runs_make_a_table_and_a_folder_means_those_in_it(
    command: Command, tmp_path: Path
) -> None:
    states(tmp_path)
    code, out, _ = command("status", ".")
    lines = [line.split() for line in out.splitlines()]
    assert code == 0
    assert [line[0] for line in lines] == ["RUN", "died", "failed", "finished", "stopped"]
    assert lines[1][:6] == ["died", "died", "60", "of", "100", "(60%)"]
    assert len(json.loads(command("status", "died", "failed", "--json")[1])) == 2


@pytest.mark.parametrize("name", ["status", "report"])
def test_a_run_that_is_not_there_is_named_with_the_nearest(
    command: Command, tmp_path: Path, name: str
) -> None:
    states(tmp_path)
    (tmp_path / "empty").mkdir()
    code, _, err = command(name, "finishd")
    assert (code, err) == (2, 'error: no run: finishd does not exist; did you mean "finished"?\n')
    code, _, err = command(name, "finished", "empty")
    assert code == 2
    assert "no run: empty has no metrics.jsonl" in err


def test_runs_of_older_versions_are_judged_by_their_files(tmp_path: Path) -> None:
    whole = make_run(tmp_path / "whole", hundred_steps())
    cut = make_run(tmp_path / "cut", hundred_steps()[:9])
    saved = make_run(tmp_path / "saved", hundred_steps()[:9])
    save_checkpoint(saved, 65)
    assert [examine(run).state for run in (whole, cut, saved)] == ["finished", "died", "stopped"]


def test_damaged_files_do_no_harm(tmp_path: Path) -> None:
    run = make_run(tmp_path / "r", hundred_steps()[:9], recipe="[[[", state={})
    for text in ("{", "[]", '{"total_steps": "many"}', '{"total_steps": 1, "outcome": "odd"}'):
        (run / "state.json").write_text(text)
        assert examine(run).state == "died"
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"kind": "train", "step": 70, "loss": {}}\n{"kind": "train", "st')
    assert (examine(run).step, examine(run).loss) == (70, None)
    (run / "metrics.jsonl").unlink()
    (run / ".lock").touch()
    assert (examine(run).step, examine(run).loss) == (0, None)


@pytest.mark.parametrize(
    "row",
    [
        f'{{"kind": "train", "step": 1{"0" * 400}, "loss": 1}}',
        '{"kind": "train", "step": true, "loss": 1}',
        (
            '{"kind": "train", "step": 60, "loss": 1e308, "tokens": 1e308, "step_seconds": 1e308}\n'
            '{"kind": "eval", "step": 70, "loss": -1e308}\n'
            '{"kind": "train", "step": 99, "loss": -1e308, "tokens": -1e308, "step_seconds": 1e308}'
        ),
        '{"kind": "train", "step": 60, "half\\ud800": 1, "loss": 1}',
        "[" * 100_000,
    ],
)
def test_rows_that_no_run_writes_do_no_harm(command: Command, tmp_path: Path, row: str) -> None:
    run = make_run(tmp_path / os.fsdecode(b"r\xff"), [train_row(50)], state={"reason": "\ud800"})
    state = f'{{"total_steps": 1{"0" * 400}}}'
    for text in ((run / "state.json").read_text(), state, "[" * 100_000):
        (run / "state.json").write_text(text)
        (run / "metrics.jsonl").write_text(f"{row}\n")
        for arguments in (("status", run.name), ("status", "."), ("report", run.name)):
            code, _, errors = command(*arguments)
            assert (code, errors) == (0, "")
        (run / "report.html").read_text("utf-8")


HOLD = """
import sys, time
from pathlib import Path
from trainer.engine.core.run_dir import RunDirectory
with RunDirectory(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def held(tmp_path: Path) -> Any:
    """A run directory that another process holds."""
    run = make_run(tmp_path / "live", hundred_steps()[:9], state={"world": 2})
    environ = {**os.environ, "PYTHONPATH": str(ROOT / ".dev")}
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, run],
        env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield run, process
    process.kill()
    process.wait()


def test_a_live_run_names_who_runs_it_and_when_it_will_be_done(command: Command, held: Any) -> None:
    run, process = held
    found = json.loads(command("status", str(run), "--json")[1])
    assert found["state"] == "running"
    assert f"process {process.pid} on " in found["holder"]
    assert found["eta_seconds"] == pytest.approx(40 * 0.5)
    assert found["warnings"] == []
    process.kill()
    process.wait()
    assert examine(run).state == "died"


def test_a_live_or_killed_run_says_which_rank_is_furthest_behind(
    command: Command, held: Any
) -> None:
    run, process = held
    (run / "logs").mkdir(exist_ok=True)
    for rank in (0, 1, 2):  # the third is of an attempt on more ranks
        heartbeat.begin(rank)
        heartbeat.begin_step(7)
        if rank != 1:
            heartbeat.enter("forward")
        BeatFile(run / "logs", rank, 0, 1.0).write()
    behind = json.loads(command("status", str(run), "--json")[1])["behind"]
    assert behind.startswith(f"rank 1 (process {os.getpid()} on ")
    assert "last seen in step 7, step, no progress for 0 s" in behind
    process.kill()
    process.wait()
    assert "furthest behind: rank 1" in command("status", str(run))[1]


def test_a_run_that_writes_nothing_looks_hung(held: Any) -> None:
    run, _ = held
    # Rows come every 5 s, so that 10 times that is less than the least patience of 60 s.
    assert examine(run, now=time.time() + 55).warnings == []
    [warning] = examine(run, now=time.time() + 70).warnings
    assert warning.startswith("no progress for 70 s")
    os.utime(run / "metrics.jsonl", (time.time() + 50, time.time() + 50))
    assert examine(run, now=time.time() + 70).warnings == []


def test_looking_again_and_again_does_not_keep_a_run_from_starting(tmp_path: Path) -> None:
    run = make_run(tmp_path / "r", [])
    (run / ".lock").touch()
    code = (
        "import sys; from pathlib import Path\n"
        "from trainer.engine.core.run_dir import RunDirectory\n"
        "print('looking', flush=True)\n"
        "while True: RunDirectory(Path(sys.argv[1])).holder()\n"
    )
    environ = {**os.environ, "PYTHONPATH": str(ROOT / ".dev")}
    looker = subprocess.Popen(
        [sys.executable, "-c", code, run], env=environ, stdout=subprocess.PIPE
    )
    assert looker.stdout is not None
    looker.stdout.readline()
    try:
        for _ in range(20):
            with RunDirectory(run):
                assert RunDirectory(run).holder()
    finally:
        looker.kill()
        looker.wait()
    assert RunDirectory(run).holder() == ""


def test_watching_ends_with_the_run(command: Command, tmp_path: Path) -> None:
    states(tmp_path)
    code, out, _ = command("status", "finished", "--watch", "--json")
    assert code == 0
    assert len(out.splitlines()) == 1


def test_only_the_end_of_a_long_file_is_read(tmp_path: Path) -> None:
    run = make_run(tmp_path / "r", [train_row(step) for step in range(1, 20_001)], state={})
    assert (run / "metrics.jsonl").stat().st_size > 5 * TAIL_BYTES
    found = examine(run)
    assert found.step == 20_000
    assert 500 < len(found.losses) < 3000


def test_what_a_run_says_of_itself_survives_each_kind_of_end(tmp_path: Path) -> None:
    with record_attempt(RunState(total_steps=7, world=2), tmp_path) as state:
        first = read_state(tmp_path)
        assert first is not None
        assert (first.total_steps, first.world, first.outcome, first.ended_at) == (7, 2, "", "")
        state.outcome = "stopped"
    last = read_state(tmp_path)
    assert last is not None
    assert (last.outcome, bool(last.ended_at)) == ("stopped", True)
    with pytest.raises(KeyError), record_attempt(RunState(total_steps=7), tmp_path):
        raise KeyError("x")
    failed = read_state(tmp_path)
    assert failed is not None
    assert (failed.outcome, failed.reason) == ("failed", "KeyError: 'x'")
    with record_attempt(RunState(total_steps=9), None):
        assert read_state(tmp_path) == failed, "other ranks write nothing"


def test_a_sparkline_goes_from_the_lowest_to_the_highest() -> None:
    assert sparkline([8.0, 1.0, 4.5, float("nan"), 1.0]) == "█▁▅ ▁"
    assert sparkline([2.0, 2.0]) == "▁▁"
    assert sparkline([]) == sparkline([float("inf")]) == ""
    assert sparkline([-1e308, 1.0, 1e308]) == " ▁ "


def test_report_writes_into_the_run_or_where_it_is_told(command: Command, tmp_path: Path) -> None:
    states(tmp_path)
    code, out, _ = command("report", "finished")
    assert code == 0
    assert out.startswith("finished/report.html: 1 run, ")
    assert (tmp_path / "finished" / "report.html").read_text().startswith("<!doctype html>")
    code, out, _ = command("report", "finished", "died", "--json")
    assert (code, json.loads(out)) == (0, {"report": "report.html", "runs": ["finished", "died"]})
    assert "2 runs compared" in (tmp_path / "report.html").read_text()
    assert command("report", ".", "--out", "new/folder/all.html")[0] == 0
    assert "4 runs compared" in (tmp_path / "new" / "folder" / "all.html").read_text()
    (tmp_path / "file").touch()
    code, _, err = command("report", "finished", "--out", "file/x.html")
    assert code == 3
    assert "file/x.html cannot be written" in err
