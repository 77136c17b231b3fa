"""What a finished run leaves for Hugging Face's libraries."""

import json

import pytest
import torch

from tests.cases import also
from tests.conversion.models import loaded_by_transformers
from tests.train.processes import complaints, finish, rows, start, tensors, write_recipe
from trainer.engine.inference.inputs import Dtype, Weights
from trainer.engine.inference.open import open_model

EXPORT = ["checkpoint.export=hf", "precision.compute=fp32", "schedule.name=constant"]


def logits_of(path, weights=Weights.MODEL):
    opened = open_model(path, weights=weights, dtype=Dtype.FP32)
    with torch.inference_mode():
        return opened.model(torch.arange(40).unsqueeze(0))


def their_logits(folder):
    with torch.inference_mode():
        return loaded_by_transformers(folder)(torch.arange(40).unsqueeze(0)).logits


@pytest.mark.parametrize(("world", "tensor"), [(1, 1), *also((2, 1), (4, 2))])
def test_weights_and_average_are_exported_at_the_end(tmp_path, world, tensor):
    recipe = write_recipe(tmp_path / "run", steps=6)
    settings = [*EXPORT, "ema.decay=0.5", f"parallel.tensor={tensor}"]
    assert finish(start(recipe, world, overrides=settings)) == [0] * world
    run = tmp_path / "run" / "run"
    torch.testing.assert_close(their_logits(run / "hf"), logits_of(run), atol=1e-5, rtol=1e-5)
    average = logits_of(run, Weights.EMA)
    torch.testing.assert_close(their_logits(run / "hf-ema"), average, atol=1e-5, rtol=1e-5)
    assert (average - logits_of(run)).abs().max() > 1e-3


def test_a_missing_export_is_made_when_a_finished_run_is_run_again(tmp_path):
    recipe = write_recipe(tmp_path / "run", steps=6)
    last = "checkpoint.last=weights"
    assert finish(start(recipe, overrides=[*EXPORT[1:], last])) == [0]
    run = tmp_path / "run" / "run"
    assert not (run / "hf").exists()
    assert finish(start(recipe, 2, 1, overrides=[*EXPORT, last])) == [0, 0]
    torch.testing.assert_close(their_logits(run / "hf"), logits_of(run), atol=1e-5, rtol=1e-5)
    made = (run / "hf" / "model.safetensors").stat().st_mtime_ns
    assert finish(start(recipe, 1, 2, overrides=[*EXPORT, last])) == [0]
    assert (run / "hf" / "model.safetensors").stat().st_mtime_ns == made, "it was there"
    assert len(rows(tmp_path / "run")) == 6


def test_the_export_of_an_earlier_end_is_replaced(tmp_path):
    recipe = write_recipe(tmp_path / "run", steps=6)
    assert finish(start(recipe, overrides=EXPORT)) == [0]
    run = tmp_path / "run" / "run"
    before = their_logits(run / "hf")
    assert finish(start(recipe, 1, 1, overrides=[*EXPORT, "run.steps=9"])) == [0]
    after = their_logits(run / "hf")
    torch.testing.assert_close(after, logits_of(run), atol=1e-5, rtol=1e-5)
    assert (after - before).abs().max() > 1e-3


def test_a_run_that_ends_early_is_exported_too(tmp_path):
    recipe = write_recipe(tmp_path / "run", steps=30)
    early = ["evaluate.interval=1", "evaluate.patience=2", "optimizer.lr=0.5"]
    assert finish(start(recipe, overrides=[*EXPORT, *early])) == [0]
    run = tmp_path / "run" / "run"
    step, _ = tensors(tmp_path / "run")
    assert step < 30
    assert json.loads((run / "exported.json").read_text())["step"] == step
    torch.testing.assert_close(their_logits(run / "hf"), logits_of(run), atol=1e-4, rtol=1e-4)


def test_adapters_are_exported_merged_and_apart(tmp_path):
    base = write_recipe(tmp_path / "base", steps=6)
    assert finish(start(base)) == [0]
    recipe = write_recipe(tmp_path / "run", steps=6)
    # Each stage of the pipeline holds adapters that the other one lacks.
    tuned = ["lora.rank=2", f"run.init_from={tmp_path / 'base' / 'run'}", "parallel.pipeline=2"]
    assert finish(start(recipe, 2, overrides=[*EXPORT, *tuned])) == [0, 0]
    run = tmp_path / "run" / "run"
    merged = logits_of(run)
    torch.testing.assert_close(their_logits(run / "hf"), merged, atol=1e-5, rtol=1e-5)
    from peft import PeftModel

    _, saved = tensors(tmp_path / "base")
    before = loaded_by_transformers(run / "hf")
    renamed = open_model(tmp_path / "base" / "run").model.config.layout.to_hf
    weights = {name.removeprefix("model."): value for name, value in saved.items()}
    state = {renamed(n): w for n, w in weights.items() if renamed(n) in before.state_dict()}
    before.load_state_dict(state)
    adapted = PeftModel.from_pretrained(before, run / "adapter").eval()
    with torch.inference_mode():
        theirs = adapted(torch.arange(40).unsqueeze(0)).logits
    torch.testing.assert_close(theirs, merged, atol=1e-5, rtol=1e-5)


@pytest.mark.matrix
def test_adapters_that_peft_has_no_name_for_are_exported_merged_alone(tmp_path):
    """Phi-3's queries are rows of a tensor that PEFT adapts as a whole."""
    recipe = write_recipe(tmp_path / "run", steps=6)
    tuned = ["model.name=phi3", "lora.rank=2", "parallel.pipeline=2"]
    assert finish(start(recipe, 2, overrides=[*EXPORT, *tuned])) == [0, 0]
    run = tmp_path / "run" / "run"
    torch.testing.assert_close(their_logits(run / "hf"), logits_of(run), atol=1e-5, rtol=1e-5)
    assert not (run / "adapter").exists()
    assert json.loads((run / "exported.json").read_text())["folders"] == ["hf"]


def nameless():
    from trainer.model_zoo.llama3.config import Llama3Config

    Llama3Config.layout.hf_names.pop("head.norm.weight")


def test_a_model_without_names_there_is_refused_before_it_trains(tmp_path):
    recipe = write_recipe(tmp_path / "run", steps=6)
    assert finish(start(recipe, overrides=EXPORT, before=nameless)) == [5]
    assert "head.norm.weight" in complaints(recipe)
    assert not (tmp_path / "run" / "run" / "metrics.jsonl").exists()
