"""Runs with DoRA and dropout: resumed, evaluated, exported, and what a recipe may get wrong."""

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.lora.test_training import folder as folder
from tests.lora.test_training import load, rows, same_weights
from tests.model_zoo.peers import their_model
from trainer import train
from trainer.engine.assemble.assemble import assemble
from trainer.engine.checkpoint.find import find_checkpoint
from trainer.engine.checkpoint.tensors import InMemoryTensor
from trainer.engine.conversion.convert import Options, convert
from trainer.engine.conversion.peft import export_adapter
from trainer.engine.conversion.source_weights import merge_tensors
from trainer.engine.core.errors import CheckpointError, RecipeError
from trainer.engine.inference.open import open_model
from trainer.engine.launch.environment import World
from trainer.engine.lora.tables import LoRA
from trainer.engine.recipe.checks.checks import check
from trainer.engine.recipe.schema import Recipe

BOTH = {"lora.dora": True, "lora.dropout": 0.25}
X = torch.arange(40).view(2, 20)


@pytest.fixture(scope="module")
def run(folder):
    """A run with both."""
    start = {"run.init_from": str(folder / "base"), **BOTH}
    return train(load(folder, "both", **start))


def test_a_run_resumes_exactly_and_other_seeds_drop_other_inputs(folder, run):
    middle = str(folder / "both/checkpoints/step-00000003")
    resumed = train(load(folder, "both-again", **BOTH, **{"run.resume": middle}))
    assert rows(resumed) == rows(run)[3:]
    one, two = (find_checkpoint(result.directory).path for result in (run, resumed))
    assert same_weights(one, two)
    start = {"run.init_from": str(folder / "base"), **BOTH}
    plain = train(load(folder, "no-dropout", **start | {"lora.dropout": 0.0}))
    assert rows(plain) != rows(run)


def test_checkpoints_start_from_norms_and_are_read_by_peft_and_transformers(folder, run, tmp_path):
    start = load(folder, "x", **{"run.init_from": str(folder / "base"), **BOTH})
    layer = assemble(start, World(), torch.device("cpu")).model.layers[0].mlp.up
    torch.testing.assert_close(layer.lora_magnitude, layer.weight.norm(dim=1))
    saved = find_checkpoint(run.directory).manifest.tensors
    assert saved["model.layers.0.attention.q.lora_magnitude"]["shape"] == [32]
    trained, base = open_model(run.directory).model, open_model(folder / "base").model
    export_adapter(run.directory, tmp_path / "adapter")
    convert("dcp2hf", run.directory, tmp_path / "hf", Options(verify=True))
    loaded = peft.PeftModel.from_pretrained(their_model(base), tmp_path / "adapter").eval()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    with torch.no_grad():
        expected = trained(X)
        assert (base(X) - expected).abs().max() > 1e-3
        torch.testing.assert_close(loaded(X).logits, expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(merged(X).logits, expected, atol=1e-5, rtol=1e-5)


def test_a_run_starts_from_an_adapter_with_magnitudes_that_peft_saved(folder, tmp_path):
    base = open_model(folder / "base").model
    settings = peft.LoraConfig(r=4, lora_alpha=16, target_modules=["up_proj"], use_dora=True)
    theirs = peft.get_peft_model(their_model(base), settings)
    with torch.no_grad():
        for name, value in theirs.named_parameters():
            if "lora_B" in name or "magnitude" in name:
                value.normal_(std=0.1)
    theirs.save_pretrained(tmp_path / "peft")
    start = {"run.init_from": str(folder / "base"), "lora.init_from": str(tmp_path / "peft")}
    start |= {"lora.targets": ["*.up.weight"], "lora.dora": True}
    parts = assemble(load(folder, "x", **start), World(), torch.device("cpu"))
    with torch.no_grad():
        expected = theirs.eval()(X).logits
        torch.testing.assert_close(parts.model.eval()(X), expected, atol=1e-5, rtol=1e-5)


def test_a_checkpoint_whose_norms_do_not_fit_is_refused():
    weights = {"a.weight": (4, 6), "a.lora_a": (2, 6), "a.lora_b": (4, 2)}
    tensors = {name: InMemoryTensor(torch.ones(shape)) for name, shape in weights.items()}
    with pytest.raises(CheckpointError, match=r"lora\.dora is true, and a\.weight has norms None"):
        merge_tensors("x", tensors, LoRA(dora=True))
    tensors["a.lora_magnitude"] = InMemoryTensor(torch.arange(4.0))
    with pytest.raises(CheckpointError, match=r"lora\.dora is false, and a\.weight has norms \(4"):
        merge_tensors("x", tensors, LoRA())
    merged = merge_tensors("x", tensors, LoRA(dora=True))["a.weight"].read(1, 3)
    torch.testing.assert_close(merged.norm(dim=1), torch.tensor([1.0, 2.0]))


FAULTS = {
    "no adapters": ({"lora": {"dora": True}}, "lora.dora", "has no meaning without adapters"),
    "experts": (
        {"model": {"name": "mixtral"}, "lora": {"rank": 2, "dropout": 0.1, "targets": ["*"]}},
        "lora.dropout",
        "adapters of experts have no dropout, as in PEFT",
    ),
}


@pytest.mark.parametrize(("recipe", "key", "message"), FAULTS.values(), ids=FAULTS)
def test_a_recipe_that_cannot_be_is_refused(recipe, key, message):
    found = check(Recipe.model_validate(recipe), None)
    (reason,) = [reason for path, reason, _ in found if ".".join(map(str, path)) == key]
    assert message in reason


def test_blocks_of_a_plugin_that_pass_no_keys_are_refused():
    from trainer.engine.lora.apply import pass_keys

    with pytest.raises(RecipeError, match="Sequential gives its layers no keys"):
        pass_keys([torch.nn.Sequential()])
