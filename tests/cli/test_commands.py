"""What each command prints, and the exit codes of the contract."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tomli

import trainer
from tests.commands import run_in_process
from trainer.cli import main as cli
from trainer.engine.core.errors import CheckpointError, DataError, RunInUse
from trainer.engine.optim.tables import optimizers

RECIPES = Path(trainer.__file__).parent / "recipes"
UNEXPECTED_HINT = "run the same with --traceback to see where"
DEBUG = str(RECIPES / "llama3_debug.toml")


@pytest.fixture
def command(capsys, tmp_path, monkeypatch):
    """Run a command line in this process; return exit code, output and errors."""
    monkeypatch.chdir(tmp_path)

    def command(*arguments):
        return run_in_process(capsys, *arguments)

    return command


def test_validate_reports_each_recipe(command, tmp_path):
    (tmp_path / "bad.toml").write_text("[run]\nstpes = 1\n")
    code, out, err = command("validate", DEBUG, "bad.toml", str(RECIPES / "quickstart.toml"))
    assert code == 2
    assert out.splitlines() == [f"{DEBUG}: valid", f"{RECIPES}/quickstart.toml: valid"]
    assert 'error: bad.toml:2:1: run.stpes: unknown key "stpes"; did you mean "steps"?' in err


def test_validate_json_is_for_programs(command, tmp_path):
    (tmp_path / "bad.toml").write_text("[run]\nsteps = 0\n")
    code, out, err = command("validate", "bad.toml", DEBUG, "--json")
    assert (code, err) == (2, "")
    bad, good = json.loads(out)
    assert (good["valid"], good["problems"]) == (True, [])
    assert bad["problems"] == [
        {
            "file": "bad.toml", "line": 2, "column": 1, "key": "run.steps",
            "message": "expected at least 1, got 0", "hint": "",
        }
    ]  # fmt: skip


def test_validate_takes_set_and_world(command):
    assert command("validate", DEBUG, "--set", "run.steps=30")[0] == 0
    assert command("validate", DEBUG, "--set", "run.steps=0")[0] == 2
    assert command("validate", DEBUG, "--world", "3")[0] == 2


def test_explain_names_file_set_flavor_and_default(command):
    recipe = str(RECIPES / "llama3_8b.toml")
    code, out, _ = command("explain", recipe, "--set", "run.seed=3", "--json")
    assert code == 0
    found = {each["key"]: (each["value"], each["origin"]) for each in json.loads(out)}
    assert found["run.seed"] == (3, "--set")
    assert found["model.dim"] == (4096, 'flavor "8b"')
    assert found["model.rope_scaling.factor"] == (8.0, 'flavor "8b"')
    assert found["optimizer.clip_norm"][1].startswith(f"{RECIPES}/base/llama3.toml:")
    assert found["data.shuffle"] == (True, "default")
    assert found["metrics.trackers"] == ([], "default")
    code, out, _ = command("explain", DEBUG, "--only", "model")
    assert all(line.startswith("model.") for line in out.splitlines())
    assert command("explain", DEBUG, "--only", "run.seed")[1].split()[:2] == ["run.seed", "0"]
    [vocab] = [line for line in out.splitlines() if "vocab_size" in line]
    assert vocab.split() == ["model.vocab_size", "none", "from", "tokenizer"]


def test_list_shows_kinds_names_and_fields(command):
    kinds = json.loads(command("list", "--json")[1])
    assert kinds["optimizer"] == ", ".join(sorted(optimizers))
    assert {"model", "tokenizer", "source", "schedule", "loss", "tracker", "table"} <= set(kinds)
    assert json.loads(command("list", "schedule", "--json")[1])["wsd"].startswith("Warmup, stable")
    fields = json.loads(command("list", "optimizer", "sgd", "--json")[1])
    assert {
        "key": "momentum", "type": "number >= 0", "default": "0.0",
        "description": "decay of the running mean of the gradient",
    } in fields  # fmt: skip
    assert "strategy" in command("list", "table", "parallel.fsdp")[1]
    assert "factor" in command("list", "table", "model.rope_scaling")[1]
    assert "quickstart" in command("list", "recipe")[1]


def test_every_table_and_component_can_be_listed(command):
    for kind in json.loads(command("list", "--json")[1]):
        for name in json.loads(command("list", kind, "--json")[1]):
            assert kind == "recipe" or command("list", kind, name)[0] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("list", "optimiser"), 'did you mean "optimizer"?'),
        (("list", "optimizer", "adamv"), 'did you mean "adam"?'),
        (("list", "recipe", "quikstart"), 'did you mean "quickstart"?'),
        (("list", "recipe", "quickstart"), "trainer new PATH --from quickstart"),
        (("explain", "nosuch.toml"), "nosuch.toml: there is no such file"),
        (("explain", DEBUG, "--only", "optimzer"), 'did you mean "optimizer"?'),
        (("explain", DEBUG, "--only", "optimizer.l"), 'did you mean "optimizer.lr"?'),
        (("run", DEBUG, "--nproc", "0"), "Invalid value for '--nproc'"),
        (("run", DEBUG, "--nproc", "3"), "does not divide over 3 data ranks"),
        (("schema", "x"), "unexpected extra argument"),
        (("new", "x.toml", "--from", "quikstart"), 'did you mean "quickstart"?'),
        (("validat", "x.toml"), "No such command 'validat'"),
        (("validate",), "Missing argument"),
        (("validate", "--nosuch", "x.toml"), "No such option: --nosuch"),
        (("validate", "x.toml", "--world", "0"), "Invalid value for '--world'"),
    ],
)
def test_wrong_usage_is_exit_code_2_and_says_what_was_meant(command, arguments, message):
    code, out, err = command(*arguments)
    assert (code, out) == (2, "")
    assert message in err


def test_schema_prints_json_schema(command):
    code, out, _ = command("schema")
    assert code == 0
    assert json.loads(out)["$schema"] == "https://json-schema.org/draft/2020-12/schema"


def test_new_writes_a_valid_recipe_and_replaces_none_unasked(command, tmp_path):
    assert command("new", "deep/mine.toml", "--from", "llama3_debug")[0] == 0
    text = (tmp_path / "deep/mine.toml").read_text()
    schema = text.splitlines()[1].removeprefix("#:schema ")
    assert json.loads((tmp_path / "deep" / schema).read_text())["title"] == "Trainer recipe"
    assert tomli.loads(text)["run"]["steps"] == 200
    assert command("validate", "deep/mine.toml")[0] == 0
    (tmp_path / "deep/mine.toml").write_text("precious")
    code, _, err = command("new", "deep/mine.toml")
    assert (code, "--force" in err) == (2, True)
    assert (tmp_path / "deep/mine.toml").read_text() == "precious"
    assert command("new", "deep/mine.toml", "--force")[0] == 0
    assert os.listdir(tmp_path / "deep") == ["mine.toml"]


def test_new_in_a_place_that_cannot_be_written_is_an_environment_fault(command, tmp_path):
    (tmp_path / "file").write_text("")
    code, _, err = command("new", "file/x.toml")
    assert code == 3
    assert err.startswith("error: file/x.toml cannot be written")


def test_version(command):
    assert command("--version") == (0, f"trainer {trainer.__version__}\n", "")


@pytest.mark.parametrize(
    ("error", "code", "printed"),
    [
        (DataError("a.jsonl:3: bad", "fix it"), 4, "error: a.jsonl:3: bad\n  hint: fix it\n"),
        (CheckpointError("none is intact"), 5, "error: none is intact\n"),
        (RunInUse("pid 3"), 7, "error: pid 3\n"),
        (KeyboardInterrupt(), 130, ""),
        (BrokenPipeError(), 0, ""),
        (
            ZeroDivisionError("oh"),
            1,
            f"error: unexpected ZeroDivisionError: oh\n  hint: {UNEXPECTED_HINT}\n",
        ),
    ],
)
def test_errors_become_exit_codes(command, monkeypatch, error, code, printed):
    def fail(path, overrides):
        raise error

    monkeypatch.setattr("trainer.cli.explain.load_recipe", fail)
    found, _, err = command("explain", DEBUG)
    assert found == code
    if not isinstance(error, BrokenPipeError):
        assert err == printed


@pytest.mark.parametrize("place", ["before", "after"])
def test_a_traceback_is_shown_to_who_asks(command, place):
    arguments = ["explain", "nosuch.toml"]
    arguments.insert(0 if place == "before" else 2, "--traceback")
    code, _, err = command(*arguments)
    assert (code, "Traceback" in err) == (2, True)
    assert err.endswith("error: nosuch.toml: there is no such file\n")


def test_completion_offers_commands_and_names(capfd, monkeypatch):
    for words, expected in [("trainer va", "validate"), ("trainer new x --from qui", "quickstart")]:
        monkeypatch.setenv("_TRAINER_COMPLETE", "complete_bash")
        monkeypatch.setenv("COMP_WORDS", words)
        monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))
        with pytest.raises(SystemExit):
            cli.main([])
        assert capfd.readouterr().out.split() == [expected]


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_goes_away_is_no_error(unbuffered):
    root = str(Path(trainer.__file__).absolute().parents[1])
    done = subprocess.run(
        f"{sys.executable} -m trainer list optimizer adam | head -1; exit ${{PIPESTATUS[0]}}",
        shell=True, executable="/bin/bash", capture_output=True, text=True, timeout=60,
        env={**os.environ, "PYTHONPATH": root, "PYTHONUNBUFFERED": unbuffered},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("Adam")
