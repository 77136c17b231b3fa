from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trainer.engine.core.errors import EnvironmentFault, ExitCode, RunInUse
from trainer.engine.core.files import atomic_write
from trainer.engine.core.run_dir import RunDirectory
from trainer.engine.core.unfinished import Unfinished

ROOT = Path(__file__).resolve().parents[2]
HOLD = """
import os, sys, time
from pathlib import Path
from trainer.engine.core.run_dir import RunDirectory
with RunDirectory(Path(sys.argv[1])):
    worker = os.fork() if len(sys.argv) > 2 else -1
    if worker: print(worker, flush=True)
    time.sleep(60)
"""


def hold(path: Path, *more: str) -> tuple[subprocess.Popen[str], int]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path), *more],
        env={**os.environ, "PYTHONPATH": str(ROOT / ".dev")},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    return process, int(process.stdout.readline())


def test_the_layout_is_made_and_the_probe_leaves_nothing(tmp_path: Path) -> None:
    with RunDirectory(tmp_path / "runs" / "a") as directory:
        assert {path.name for path in directory.path.iterdir()} == {".lock", "checkpoints", "logs"}


def test_what_a_killed_writer_left_is_cleared(tmp_path: Path) -> None:
    for name in (".state.json.1234.tmp", "..probe.77.88.tmp", ".mine.tmp", "recipe.toml"):
        (tmp_path / name).write_text("")
    (tmp_path / ".folder.5.tmp").mkdir()
    with RunDirectory(tmp_path):
        left = {path.name for path in tmp_path.iterdir()}
    assert left == {".folder.5.tmp", ".lock", ".mine.tmp", "checkpoints", "logs", "recipe.toml"}


def test_a_second_run_is_told_who_holds_the_directory(tmp_path: Path) -> None:
    process, _ = hold(tmp_path)
    try:
        with pytest.raises(RunInUse) as caught, RunDirectory(tmp_path):
            pass
    finally:
        process.kill()
        process.communicate()
    assert caught.value.exit_code == ExitCode.IN_USE
    assert re.search(
        rf"process {process.pid} on {re.escape(socket.gethostname())}, started \d{{4}}-\d\d-\d\dT",
        caught.value.message,
    )


@pytest.mark.parametrize("with_worker", [False, True])
def test_a_killed_run_frees_the_lock_even_if_a_forked_worker_lives_on(
    tmp_path: Path, with_worker: bool
) -> None:
    process, worker = hold(tmp_path, *["fork"] * with_worker)
    process.send_signal(signal.SIGKILL)
    process.wait()
    try:
        with RunDirectory(tmp_path) as directory:
            holder = json.loads((directory.path / ".lock").read_text())
        assert holder["pid"] == os.getpid()
    finally:
        if worker > 0:
            os.kill(worker, signal.SIGKILL)
        process.communicate()


def test_the_lock_is_given_back(tmp_path: Path) -> None:
    for _ in range(2):
        with RunDirectory(tmp_path), pytest.raises(RunInUse), RunDirectory(tmp_path):
            pass


def test_a_lock_file_with_nonsense_is_no_hindrance(tmp_path: Path) -> None:
    (tmp_path / ".lock").write_text("[" * 9999)
    with RunDirectory(tmp_path), pytest.raises(RunInUse), RunDirectory(tmp_path):
        pass


def test_deleting_the_lock_file_frees_nothing(tmp_path: Path) -> None:
    with RunDirectory(tmp_path) as directory:
        (tmp_path / ".lock").unlink()
        assert directory.holder() == "another process"
        with pytest.raises(RunInUse), RunDirectory(tmp_path):
            pass


def test_the_lock_file_alone_is_enough_where_folders_have_no_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock = fcntl.flock

    def on_nfs(descriptor: int, operation: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EBADF, "Bad file descriptor")
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", on_nfs)
    with RunDirectory(tmp_path) as directory:
        assert directory.holder().startswith(f"process {os.getpid()} on ")
        with pytest.raises(RunInUse):
            RunDirectory(tmp_path).lock()


def test_a_lock_that_is_a_link_is_refused_and_its_target_untouched(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").symlink_to("../mine.txt")
    with pytest.raises(EnvironmentFault, match="it is a link"), RunDirectory(tmp_path / "run"):
        pass
    assert (tmp_path / "mine.txt").read_text() == "mine"


def test_a_lock_that_is_a_pipe_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / ".lock")
    with pytest.raises(EnvironmentFault, match="is not a regular file"), RunDirectory(tmp_path):
        pass
    assert RunDirectory(tmp_path).holder() == ""


def test_the_next_run_deletes_an_export_that_was_killed(tmp_path: Path) -> None:
    for name in (".tmp-hf-0123abcd", ".tmp-hf-ema-0123abcd", ".tmp-mine-0123abcd"):
        (tmp_path / name / "hf").mkdir(parents=True)
    alive = Unfinished(tmp_path / "adapter")
    with RunDirectory(tmp_path):
        left = {path.name for path in tmp_path.glob(".tmp-*")}
    assert left == {".tmp-mine-0123abcd", alive.path.parent.name}
    alive.discard()


def test_a_path_that_is_a_file_is_an_environment_fault(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    with pytest.raises(EnvironmentFault, match=r"runs/a: Not a directory"):
        RunDirectory(tmp_path / "runs" / "a").prepare()


@pytest.mark.skipif(not Path("/proc/version").exists(), reason="needs a read-only file system")
def test_a_read_only_file_system_is_an_environment_fault() -> None:
    with pytest.raises(EnvironmentFault, match="cannot write"):
        RunDirectory(Path("/proc/runs")).prepare()


def test_a_folder_without_permission_is_an_environment_fault(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        if os.access(tmp_path, os.W_OK):
            pytest.skip("root may write anywhere")
        with pytest.raises(EnvironmentFault, match="Permission denied"):
            RunDirectory(tmp_path / "a").prepare()
    finally:
        tmp_path.chmod(0o700)


def test_a_full_disk_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    atomic_write(path, "old")
    code = (
        "import resource, signal, sys; from pathlib import Path\n"
        "from trainer.engine.core.files import atomic_write\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))\n"
        "atomic_write(Path(sys.argv[1]), 'new' * 100)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, path],
        env={**os.environ, "PYTHONPATH": str(ROOT / ".dev")},
        capture_output=True,
        text=True,
    )
    assert "File too large" in done.stderr
    assert [file.name for file in tmp_path.iterdir()] == ["recipe.toml"]
    assert path.read_text() == "old"


def test_a_reader_never_sees_half_a_file(tmp_path: Path) -> None:
    path = tmp_path / "x"
    texts = [letter * 100_000 for letter in "ab"]
    atomic_write(path, texts[0])
    code = (
        "import sys; from pathlib import Path\n"
        "from trainer.engine.core.files import atomic_write\n"
        "while True:\n"
        "    for letter in 'ab': atomic_write(Path(sys.argv[1]), letter * 100_000)\n"
    )
    writer = subprocess.Popen(
        [sys.executable, "-c", code, path], env={**os.environ, "PYTHONPATH": str(ROOT / ".dev")}
    )
    seen = set()
    end = time.monotonic() + 1.5
    while time.monotonic() < end:
        seen.add(path.read_text())
    writer.kill()
    writer.wait()
    assert seen <= set(texts)
