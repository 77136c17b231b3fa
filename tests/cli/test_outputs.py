"""Where commands write: devices, pipes, links, and files that are there already."""

import os
import stat
import threading
from pathlib import Path

import pytest

import trainer
from trainer.cli import main as cli
from trainer.engine.core.errors import EnvironmentFault, RecipeError
from trainer.engine.core.files import write_asked

DEBUG = str(Path(trainer.__file__).parent / "recipes" / "llama3_debug.toml")


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Make a run directory; return its name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text('{"kind": "train", "step": 1, "loss": 2.0}\n')
    return "run"


def call(capsys, *words):
    with pytest.raises(SystemExit) as stop:
        cli.main(words)
    return int(stop.value.code), capsys.readouterr()


COMMANDS = [
    ("report", "run", "--out"),
    ("launch", "slurm", DEBUG, "--gpus-per-node", "1", "-o"),
    ("plan", DEBUG, "--html"),
    ("new",),
]


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: words[0])
def test_what_is_there_is_replaced_only_by_force(words, run, capsys):
    target = Path("out.txt")
    target.write_text("mine")
    code, texts = call(capsys, *words, str(target))
    assert (code, target.read_text()) == (2, "mine")
    assert "out.txt is there already; give another path, or --force" in texts.err
    code, texts = call(capsys, *words, str(target), "--force")
    assert code == 0, texts.err
    assert target.read_text() != "mine"
    Path("link").symlink_to(target)
    target.write_text("mine")
    assert call(capsys, *words, "link")[0] == 2
    assert call(capsys, *words, "link", "--force")[0] == 0
    assert os.readlink("link") == "out.txt"
    assert target.read_text() != "mine"


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: words[0])
def test_a_pipe_is_written_through(words, run, capsys):
    os.mkfifo("pipe")
    received = []
    reader = threading.Thread(target=lambda: received.append(Path("pipe").read_text()))
    reader.start()
    code, texts = call(capsys, *words, "pipe")
    reader.join(60)
    assert code == 0, texts.err
    assert len(received[0]) > 100
    assert stat.S_ISFIFO(os.stat("pipe").st_mode)


def test_a_device_is_written_through(tmp_path):
    write_asked(Path("/dev/null"), "text")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    (tmp_path / "null").symlink_to("/dev/null")
    write_asked(tmp_path / "null", "text", replace=True)
    assert (tmp_path / "null").is_symlink()


def test_a_link_that_leads_nowhere_yet_is_followed(tmp_path):
    (tmp_path / "link").symlink_to("folder/new.txt")
    write_asked(tmp_path / "link", "text")
    assert (tmp_path / "folder" / "new.txt").read_text() == "text"


def test_a_folder_is_no_file(tmp_path):
    with pytest.raises(EnvironmentFault, match="Is a directory"):
        write_asked(tmp_path, "text", replace=True)
    assert list(tmp_path.iterdir()) == []


def test_a_report_in_its_usual_place_is_made_again(run, capsys):
    for _ in range(2):
        assert call(capsys, "report", run)[0] == 0


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: words[0])
def test_a_name_that_is_too_long_is_foreseen(words, run, capsys):
    code, texts = call(capsys, *words, "x" * 300)
    assert (code, "File name too long" in texts.err, "unexpected" in texts.err) == (3, True, False)


@pytest.mark.parametrize(
    "words",
    [
        ["status", "LONG"],
        ["report", "LONG"],
        ["generate", "LONG"],
        ["evaluate", "LONG"],
        ["sweep", "LONG", "--grid", "run.seed=1"],
        ["checkpoint", "list", "LONG"],
        ["checkpoint", "prune", "LONG", "--keep", "1"],
        ["convert-ckpt", "dcp2hf", "LONG", "out"],
        ["convert-ckpt", "hf2hf", ".", "LONG"],
        ["data", "prepare", "LONG", "--out", "out"],
        ["data", "train-tokenizer", "text.txt", "--vocab-size", "257", "--out", "LONG"],
        ["data", "inspect", "LONG"],
        ["validate", "LONG"],
        ["run", DEBUG, "--set", "run.dir=LONG"],
        ["run", DEBUG, "--set", "run.resume=LONG", "--set", "run.steps=1"],
        ["run", DEBUG, "--dry-run", "--set", "data.sources=[{name='text', path='LONG'}]"],
    ],
    ids=" ".join,
)
def test_long_paths_are_foreseen_by_every_command(words, run, capsys):
    Path("text.txt").write_text("some text\n")
    before = sorted(os.listdir())
    code, texts = call(capsys, *(word.replace("LONG", "x" * 300) for word in words))
    assert code in (2, 3, 4, 5), texts.err
    assert "unexpected" not in texts.err
    assert sorted(os.listdir()) == before


def test_an_address_is_refused_here_too(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RecipeError, match="is an address"):
        write_asked(Path("s3://bucket/page.html"), "text")
    assert list(tmp_path.iterdir()) == []
