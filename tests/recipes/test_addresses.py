"""A path is never an address such as `s3://bucket/runs`, wherever it is given."""

import re

import pytest
from pydantic import ValidationError

from trainer.cli import main as cli
from trainer.engine.core.errors import RecipeError
from trainer.engine.core.files import address_problem
from trainer.engine.recipe.documents.reference import sections

ADDRESS = "s3://bucket/name"
# A key with one of these words in its name holds a path; the others of them are none.
WORDS = {"path", "dir", "file", "folder", "csv", "resume", "init_from", "cache"}
NO_PATHS = set()


def keys_of_paths():
    return [
        (section.config, key)
        for section in sections()
        for key, field in section.config.model_fields.items()
        if any(re.search(rf"(^|_){word}(_|$)", key) for word in WORDS)
        and "str" in str(field.annotation)
        and (section.table, key) not in NO_PATHS
    ]


def test_every_key_that_holds_a_path_refuses_an_address():
    found = keys_of_paths()
    assert len(found) > 12
    for config, key in found:
        with pytest.raises(ValidationError, match="is an address, not a path"):
            config.model_validate({key: ADDRESS})


@pytest.mark.parametrize(
    "text", ["s3://b/x", "gs://b", "hdfs://h:9000/x", "file:///x", "az+v2://x", "s3:/b/x"]
)
def test_any_scheme_is_one(text):
    assert address_problem(text)


@pytest.mark.parametrize("text", ["runs", "/a/b", "a:b", "c:/x", "./s3:x", "runs/s3:/x", "", "~/x"])
def test_other_paths_are_none(text):
    assert not address_problem(text)


def test_the_message_names_file_line_and_key(problems):
    [problem] = problems('[run]\nsteps = 1\ndir = "s3://bucket/runs"\n')
    assert problem.render().startswith(
        'error: recipe.toml:3:1: run.dir: "s3://bucket/runs" is an address, not a path: object '
        "stores are not available yet"
    )
    [problem] = problems("[run]\nsteps = 1\n", "run.init_from=gs://b/x")
    assert (problem.file, problem.key) == ("--set", "run.init_from")
    assert problem.message.startswith('"gs://b/x" is an address')
    [problem] = problems('extends = ["s3://b/x.toml"]\n')
    assert (problem.line, problem.key) == (1, "extends.0")
    assert "is an address" in problem.message


def test_addresses_of_trackers_and_datasets_stay(load):
    text = "[run]\nsteps = 1\n[[metrics.trackers]]\nname = 'mlflow'\ntracking_uri = 'http://h:5000'"
    text += "\n[[data.sources]]\nname = 'hf'\nrepo = 'allenai/c4'\n"
    load(text)


@pytest.mark.parametrize(
    "words",
    [
        ["validate", ADDRESS],
        ["report", "runs", "--out", ADDRESS],
        ["status", ADDRESS],
        ["new", ADDRESS],
        ["checkpoint", "list", ADDRESS],
        ["convert-ckpt", "dcp2hf", ADDRESS, "x"],
        ["convert-ckpt", "hf2hf", "x", ADDRESS],
        ["convert-ckpt", "hf2dcp", "x", "y", "--tokenizer", ADDRESS],
        ["generate", ADDRESS],
        ["evaluate", "x", "--data", ADDRESS],
        ["data", "prepare", "x.txt", "--out", ADDRESS],
        ["data", "prepare", ADDRESS, "--out", "x"],
        ["data", "train-tokenizer", ADDRESS, "--vocab-size", "300", "--out", "x"],
    ],
)
def test_commands_refuse_addresses(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        cli.main(words)
    errors = capsys.readouterr().err
    assert (stop.value.code, "is an address" in errors) == (2, True), errors
    assert "s3://bucket/name" in errors
    assert list(tmp_path.iterdir()) == []


def test_paths_in_python_are_checked(tmp_path, monkeypatch):
    from pathlib import Path

    from trainer.engine.checkpoint.find import find_checkpoint
    from trainer.engine.recipe.load import load_recipe

    monkeypatch.chdir(tmp_path)
    for use in (load_recipe, lambda path: find_checkpoint(Path(path))):
        with pytest.raises(RecipeError, match="is an address"):
            use(ADDRESS)
