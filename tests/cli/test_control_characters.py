"""Control characters in files, names and recipes of others: escaped wherever they are printed."""

import json
import logging
import re
import sys

import pytest
import xxhash

from trainer.cli import generate as generate_command
from trainer.cli import main as cli
from trainer.engine.core.errors import CheckpointError, Problem, RecipeError
from trainer.engine.core.text.display import make_lines_printable, make_printable
from trainer.engine.observe.progress import LineProgress, forward_logs

ESC = "\x1b]0;owned\x07\x1b[2J"
HOSTILE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]")


def call(capsys, *words):
    with pytest.raises(SystemExit) as stop:
        cli.main([str(word) for word in words])
    texts = capsys.readouterr()
    assert not HOSTILE.search(texts.out), repr(texts.out)
    assert not HOSTILE.search(texts.err), repr(texts.err)
    return int(stop.value.code), texts.out + texts.err


def seal(folder, **changes):
    """Write a manifest whose texts are hostile and whose checksum is right."""
    manifest = {
        "step": 1, "samples": 8, "world": 1, "mesh": {ESC: ESC}, "recipe": {ESC: ESC},
        "recipe_hash": ESC, "tokenizer": ESC, "data": {}, "versions": {ESC: ESC}, "run_id": ESC,
        "attempt": 0, "contents": "full", "extra": {},
        "tensors": {ESC: {"shape": [1], "dtype": ESC}},
        "files": {}, "saved_at": ESC, "format": 1, **changes,
    }  # fmt: skip
    body = f'"manifest": {json.dumps(manifest)}}}\n'.encode()
    folder.mkdir(parents=True)
    line = b'{"xxh3": "%s",\n' % xxhash.xxh3_128_hexdigest(body).encode()
    (folder / "manifest.json").write_bytes(line + body)


@pytest.mark.parametrize(
    "words",
    [
        ["list"],
        ["inspect"],
        ["inspect", "--tensors"],
        ["verify"],
        ["prune", "--keep", "1", "--dry-run"],
    ],
)
@pytest.mark.parametrize(
    "changes",
    [{}, {"files": {ESC: {"bytes": 1, "xxh3": ""}}}, {"format": ESC}, {"step": ESC}],
    ids=["texts", "file", "format", "step"],
)
def test_checkpoint_commands(tmp_path, capsys, words, changes):
    run = tmp_path / f"run{ESC}"
    seal(run / "checkpoints" / "step-00000001", **changes)
    assert "owned" in call(capsys, "checkpoint", words[0], run, *words[1:])[1] or words[0] != "list"


def test_status_and_report(tmp_path, capsys):
    run = tmp_path / f"run{ESC}"
    run.mkdir()
    row = {"kind": "train", "step": 1, "loss": 1.0, ESC: 2.0}
    (run / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    state = {"total_steps": 3, "outcome": "failed", "reason": ESC, "device": ESC}
    (run / "state.json").write_text(json.dumps(state))
    assert call(capsys, "status", run)[0] == 0
    assert call(capsys, "status", run, run.parent)[0] == 0
    assert call(capsys, "report", run)[0] == 0


@pytest.mark.parametrize(
    "text",
    [
        f"[run]\nsteps = {json.dumps(ESC)}\n",
        f"[run]\nsteps = 1\n{json.dumps(ESC)} = 1\n",
        f"[run]\nsteps = 1\n[model]\nname = {json.dumps(ESC)}\n",
        f"[run]\nsteps = 1\n[tokenizer]\nname = 'hf'\npath = {json.dumps(ESC)}\n",
        f"[run]\nsteps = 1\ndir = {json.dumps('s3://' + ESC)}\n",
        f"extends = [{json.dumps(ESC + '.toml')}]\n",
        f"[run]\nsteps = 1\n[plugins]\nmodules = [{json.dumps(ESC)}]\n",
    ],
)
@pytest.mark.parametrize("command", ["validate", "explain", "plan", "run"])
def test_recipes(tmp_path, capsys, monkeypatch, text, command):
    monkeypatch.chdir(tmp_path)
    (tmp_path / f"recipe{ESC}.toml").write_text(text)
    more = ["--dry-run"] if command == "run" else []
    call(capsys, command, f"recipe{ESC}.toml", *more)


def test_errors_keep_their_lines_and_escape_the_rest():
    error = CheckpointError(f"one:\n  {ESC}", f"a\u202eb\r{ESC}")
    assert error.render().count("\n") == 2
    assert not HOSTILE.search(error.render())
    assert not HOSTILE.search(RecipeError([Problem(ESC, ESC, ESC, 1, 1, ESC)]).render())
    assert make_printable("naïve\n") == "naïve\\n"
    assert make_lines_printable("a\x9b\nb") == "a\\x9b\nb"


def test_an_unforeseen_error_is_escaped(capsys, monkeypatch):
    from trainer.cli import doctor

    def fail():
        raise RuntimeError(ESC)

    monkeypatch.setattr(doctor, "doctor", fail)
    assert call(capsys, "doctor")[0] == 1


def test_what_a_run_logs_is_escaped(capsys):
    progress = LineProgress(sys.stdout)
    with forward_logs(progress):
        logging.getLogger("trainer.engine.data").warning("%s", ESC)
        progress.note(ESC)
    assert not HOSTILE.search(capsys.readouterr().out)


def test_generated_text_is_escaped_on_a_terminal_alone(capsys, monkeypatch):
    generate_command._print(["a"], [ESC], chat=False, as_json=False)
    assert capsys.readouterr().out == f"a{ESC}\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    generate_command._print(["a"], [f"{ESC}\nb"], chat=False, as_json=False)
    assert capsys.readouterr().out == f"a{make_printable(ESC)}\nb\n"
