"""`trainer evaluate` on a run's own checkpoint, on others' folders and on bad input."""

import json

import pytest
import torch

from tests.conversion.models import hf_folder
from tests.train.processes import finish, rows, start, write_recipe
from trainer.cli.main import main
from trainer.engine.core.errors import CheckpointError
from trainer.engine.inference.inputs import Weights
from trainer.engine.inference.open import open_model

TEXT = "def naïve(x):\n    return [x * i for i in range(10)]  # ü\n"
SPLIT = (
    'evaluate.splits=[{name="short",seq_len=16,micro_batch=1,'
    'sources=[{name="synthetic",num_documents=20}]}]'
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return hf_folder(tmp_path_factory.mktemp("hf") / "model")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with an average and a further split, whose every evaluation reads both whole."""
    folder = tmp_path_factory.mktemp("run") / "run"
    recipe = write_recipe(folder, steps=6)
    settings = ["ema.decay=0.8", "evaluate.steps=1000", "precision.compute=fp32", SPLIT]
    assert finish(start(recipe, overrides=settings)) == [0]
    return folder


@pytest.fixture
def command(capsys):
    """Run a command line in this process; return exit code, output and errors."""

    def command(*arguments):
        with pytest.raises(SystemExit) as stop:
            main([str(argument) for argument in arguments])
        return int(stop.value.code or 0), *capsys.readouterr()

    return command


def test_splits_have_the_losses_of_the_runs_own_evaluation(run, command):
    code, out, _ = command("evaluate", run / "run", "--weights", "ema", "--json", "--batch", 3)
    assert code == 0
    found = json.loads(out)
    assert [each["name"] for each in found["texts"]] == ["validation split", "short split"]
    evaluated = rows(run, "eval")
    for split, row in zip(found["texts"], evaluated, strict=True):
        assert split["token"]["loss"] == pytest.approx(row["loss"], rel=1e-6)
        assert split["token"]["perplexity"] == pytest.approx(row["perplexity"], rel=1e-5)
    assert (found["step"], found["weights"], found["dtype"]) == (6, "ema", "fp32")
    _, out, _ = command("evaluate", run / "run", "--split", "validation", "--json")
    (other,) = json.loads(out)["texts"]
    assert other["token"]["count"] == found["texts"][0]["token"]["count"]
    assert abs(other["token"]["loss"] - evaluated[0]["loss"]) > 1e-4, "the last weights are others"
    _, out, _ = command("evaluate", run / "run", "--limit", 2, "--split", "short")
    assert out.startswith("short split: 2 texts")


@pytest.mark.matrix
def test_splits_of_every_checkpoint_are_measured_on_several_ranks(run, capfd):
    for ranks in (1, 2):
        words = ["evaluate", str(run / "run"), "--every-checkpoint", "--json", f"--nproc={ranks}"]
        with pytest.raises(SystemExit) as stop:
            main([*words, "--weights", "ema"])
        assert not stop.value.code
        (*_, last) = json.loads(capfd.readouterr().out)["checkpoints"]
        losses = [each["token"]["loss"] for each in last["texts"]]
        expected = [row["loss"] for row in rows(run, "eval")]
        assert losses == pytest.approx(expected, rel=1e-6)


def test_averaged_weights_are_what_the_checkpoint_holds(run):
    average = open_model(run / "run", weights=Weights.EMA).model.state_dict()
    last = open_model(run / "run").model.state_dict()
    assert average.keys() == last.keys()
    assert any(not torch.equal(average[name], last[name]) for name in last)


def test_bad_input_is_refused_with_what_to_do(run, folder, command, tmp_path):
    text = tmp_path / "a.txt"
    text.write_text(TEXT, encoding="utf-8")
    bad = {
        ("--data", tmp_path / "nix.txt"): (4, "no such file"),
        ("--source", "jsnl"): (2, 'did you mean "jsonl"?'),
        ("--source", "jsonl", "--set", "pat=x"): (2, 'did you mean "path"?'),
        ("--set", "path=x"): (2, "--source"),
        ("--batch", 99_999_999_999): (2, "65536"),
        ("--limit", 10**30): (2, "--limit"),
        ("--seq-len", 8): (2, "the validation split"),
        ("--num-fewshot", 1): (2, "are for --tasks"),
        ("--split", "shrt"): (2, 'did you mean "short"?'),
        ("--split", "short", "--data", text): (2, "--split names"),
        ("--data", text, "--stride", 99, "--seq-len", 8): (2, "--stride 99"),
        ("--source", "jsonl", "--set", f"path={text}"): (4, "a.txt:1"),
    }
    for arguments, (expected, word) in bad.items():
        code, _, err = command("evaluate", run / "run", *arguments)
        assert code == expected, err
        assert word in err
    code, _, err = command("evaluate", tmp_path / "nowhere")
    assert (code, "no checkpoint" in err) == (5, True)
    code, _, err = command("evaluate", folder)
    assert code == 2, err
    assert "--data" in err
    with pytest.raises(CheckpointError, match="one set of weights"):
        open_model(folder, weights=Weights.EMA)


def test_a_folder_of_an_unknown_model_is_refused(folder, tmp_path, command):
    settings = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(settings | {"model_type": "lama"}))
    code, _, err = command("evaluate", tmp_path)
    assert code == 5
    assert 'did you mean "llama"?' in err
    del settings["hidden_size"]
    (tmp_path / "config.json").write_text(json.dumps(settings))
    code, _, err = command("evaluate", tmp_path)
    assert code == 5
    assert "hidden_size" in err


def test_a_perplexity_beyond_all_numbers_is_valid_json(run, command, tmp_path):
    (tmp_path / "a.txt").write_text("x" * 300, encoding="utf-8")
    code, out, err = command("evaluate", run / "run", "--data", tmp_path / "a.txt", "--json")
    assert code == 0, err
    (found,) = json.loads(out, parse_constant=lambda word: pytest.fail(word))["texts"]
    assert found["word"]["perplexity"] == "Infinity"


def test_files_of_every_kind_are_read_by_their_ending(run, command, tmp_path):
    (tmp_path / "a.txt").write_text("some text", encoding="utf-8")
    (tmp_path / "b.jsonl").write_text('{"text": "some text"}\n', encoding="utf-8")
    files = [word for name in ("a.txt", "b.jsonl") for word in ("--data", tmp_path / name)]
    code, out, err = command("evaluate", run / "run", *files, "--json")
    assert code == 0, err
    first, second = json.loads(out)["texts"]
    assert first["token"] == second["token"]
    assert first["byte"]["count"] == 9
