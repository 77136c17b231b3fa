"""A preparation by the command: killed at random moments, and on a full disk."""

import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.cases import also
from tests.corpus.corpora import SMALL, content, corpus, made, parts_of, small_parts  # noqa: F401

pytestmark = pytest.mark.usefixtures("small_parts")

COMMAND = f"""
import sys
from trainer.engine.sources import documents, files
from trainer.cli.main import main
documents.PART_BYTES = files.PART_BYTES = {SMALL}
main(sys.argv[1:])
"""


def command(*arguments: str, **settings: Any) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(
        [sys.executable, "-P", "-c", COMMAND, *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **settings,
    )


@pytest.mark.parametrize("kills", [3, *also(10)])
@pytest.mark.matrix
def test_killed_often_it_goes_on_and_makes_the_same_bytes(tmp_path: Path, kills: int) -> None:
    source = corpus(tmp_path, megabytes=5)
    arguments = ["data", "prepare", source.path, "--out", str(tmp_path / "out"), "--workers", "2"]
    arguments += ["--shard-tokens", str(2**16)]
    expected = content(made(tmp_path / "undisturbed", source))
    total = len(source.parts())
    assert total > 200  # on a busy machine many are made before the kill comes
    draw = random.Random(1)
    before = 0
    for kill in range(kills):
        process = command(*arguments)
        while len(parts_of(tmp_path / "out")) < before + 5 and process.poll() is None:
            time.sleep(0.001)
        time.sleep(draw.random() * 0.02)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL, (kill, process.stderr and process.stderr.read())
        assert not (tmp_path / "out").exists()
        # What was done is not done again.
        before, found = len(parts_of(tmp_path / "out")), before
        assert before >= found + 5
    process = command(*arguments)
    output, errors = process.communicate()
    assert process.returncode == 0, errors
    assert "already" not in output
    assert content(tmp_path / "out") == expected
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "corpus.jsonl", "out", "undisturbed",
    ]  # fmt: skip


def test_a_full_disk_is_named_and_the_same_command_goes_on(tmp_path: Path) -> None:
    source = corpus(tmp_path)
    arguments = ["data", "prepare", source.path, "--out", str(tmp_path / "out")]

    def limit() -> None:  # no file may grow beyond a part's
        resource.setrlimit(resource.RLIMIT_FSIZE, (3 * SMALL, 3 * SMALL))

    process = command(*arguments, preexec_fn=limit)
    _, errors = process.communicate()
    assert process.returncode == 3, errors
    assert f"cannot write tokens to {tmp_path / 'out'}: File too large" in errors
    assert "the same command resumes" in errors
    assert parts_of(tmp_path / "out")
    process = command(*arguments)
    assert process.wait() == 0
    assert content(tmp_path / "out") == content(made(tmp_path / "other", source, shard=2**28))
