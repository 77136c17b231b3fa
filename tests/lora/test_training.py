"""Adapters saved, resumed, converted, and what a recipe may get wrong."""

import json
from pathlib import Path

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.model_zoo.peers import our_model, their_model
from trainer import load_recipe, train
from trainer.cli.main import main
from trainer.engine.assemble.assemble import assemble
from trainer.engine.assemble.build import build_model
from trainer.engine.checkpoint.find import find_checkpoint
from trainer.engine.checkpoint.tensors import InMemoryTensor
from trainer.engine.conversion.convert import Options, convert
from trainer.engine.conversion.peft import export_adapter
from trainer.engine.conversion.source_weights import merge_tensors
from trainer.engine.core.errors import CheckpointError, RecipeError
from trainer.engine.inference.inputs import Weights
from trainer.engine.inference.open import open_model
from trainer.engine.launch.environment import World
from trainer.engine.lora.tables import LoRA
from trainer.engine.recipe.schema import Recipe

RECIPE = """
[run]
steps = 6
[model]
dim = 32
n_layers = 2
n_heads = 4
n_kv_heads = 2
ffn_dim = 48
vocab_size = 320
[data]
seq_len = 32
global_batch = 4
[[data.sources]]
name = "synthetic"
num_documents = 50
[optimizer]
lr = 1e-2
[[optimizer.groups]]
match = "*.norm.weight"
weight_decay = 0.0
[precision]
compute = "fp32"
[metrics]
interval = 1
[checkpoint]
interval = 3
keep = 9
"""
ADAPTED = {"lora.rank": 4, "run.name": "adapted"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where a base model, and then its adapters, were trained."""
    folder = tmp_path_factory.mktemp("runs")
    recipe = folder / "base.toml"
    recipe.write_text(RECIPE)
    train(load_recipe(recipe, {"run.dir": str(folder)}))
    adapted = ADAPTED | {"run.dir": str(folder), "run.init_from": str(folder / "base")}
    train(load_recipe(recipe, adapted))
    return folder


def load(folder, name, **changes):
    overrides = ADAPTED | {"run.dir": str(folder), "run.name": name} | changes
    return load_recipe(folder / "base.toml", overrides)


def rows(result):
    return [row["loss"] for row in result.rows if row["kind"] == "train"]


def test_a_run_resumes_exactly_with_its_adapters(folder):
    start = {"run.init_from": str(folder / "base")}
    middle = str(folder / "adapted/checkpoints/step-00000003")
    whole = train(load(folder, "whole", **start))
    resumed = train(load(folder, "resumed", **{"run.resume": middle}))
    assert rows(resumed) == rows(whole)[3:]
    one, two = (find_checkpoint(result.directory).path for result in (whole, resumed))
    assert same_weights(one, two)


def same_weights(one, two):
    models = [open_model(path).model for path in (one, two)]
    pairs = zip(*(model.parameters() for model in models), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def test_the_base_stays_as_it_was_and_its_adapters_are_saved(folder):
    saved = find_checkpoint(folder / "adapted").manifest.tensors
    assert saved["model.layers.0.attention.q.lora_a"]["shape"] == [4, 32]
    state = {name for name in saved if name.startswith("optimizer.")}
    assert state
    assert all(".lora_" in name for name in state)
    recipe = load(folder, "x", **{"run.init_from": str(folder / "adapted")})
    base = load(folder, "y", **{"run.init_from": str(folder / "base")})
    cpu = torch.device("cpu")
    ours, theirs = (
        dict(assemble(r, World(), cpu).model.named_parameters()) for r in (recipe, base)
    )
    assert torch.equal(ours["layers.1.mlp.up.weight"], theirs["layers.1.mlp.up.weight"])
    assert ours["layers.1.mlp.up.lora_b"].abs().max() > 0, "adapters of the checkpoint are read too"
    assert theirs["layers.1.mlp.up.lora_b"].abs().max() == 0


def test_peft_loads_the_adapters_of_a_checkpoint(folder, tmp_path):
    export_adapter(folder / "adapted", tmp_path / "adapter")
    trained = open_model(folder / "adapted").model
    base = open_model(folder / "base").model
    loaded = peft.PeftModel.from_pretrained(their_model(base), tmp_path / "adapter")
    x = torch.arange(40).view(2, 20)
    with torch.no_grad():
        expected, found = trained(x), loaded(x).logits
        assert (base(x) - expected).abs().max() > 1e-3
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    with pytest.raises(CheckpointError, match="no adapters"):
        export_adapter(folder / "base", tmp_path / "none")


def test_a_run_goes_on_from_an_adapter_that_peft_saved(folder, tmp_path):
    """PEFT's own file, with values that PEFT chose."""
    base = open_model(folder / "base").model
    settings = peft.LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "up_proj"])
    theirs = peft.get_peft_model(their_model(base), settings)
    with torch.no_grad():
        for name, value in theirs.named_parameters():
            if "lora_B" in name:
                value.normal_(std=0.1)
    theirs.save_pretrained(tmp_path / "peft")
    targets = {"lora.targets": ["*.q.weight", "*.up.weight"]}
    start = {"run.init_from": str(folder / "base"), "lora.init_from": str(tmp_path / "peft")}
    parts = assemble(load(folder, "x", **targets, **start), World(), torch.device("cpu"))
    x = torch.arange(40).view(2, 20)
    with torch.no_grad():
        expected = theirs(x).logits
        torch.testing.assert_close(parts.model(x), expected, atol=1e-5, rtol=1e-5)
        assert (base(x) - expected).abs().max() > 1e-3
    other = {"lora.rank": 8, "lora.targets": ["*.q.weight"]} | start
    with pytest.raises(CheckpointError, match=r"(?s)lora.rank is 8.*r = 4.*\[4, 32\].*up_proj"):
        assemble(load(folder, "x", **other), World(), torch.device("cpu"))
    path = tmp_path / "peft/adapter_config.json"
    said = path.read_text()
    path.write_text(said.replace('"init_lora_weights": true', '"init_lora_weights": "pissa"'))
    with pytest.raises(CheckpointError, match="init_lora_weights = pissa, which is not read"):
        assemble(load(folder, "x", **targets, **start), World(), torch.device("cpu"))
    path.write_text(said.replace('"use_dora": false', '"use_dora": true'))
    with pytest.raises(CheckpointError, match=r"lora\.dora is false, adapter_config"):
        assemble(load(folder, "x", **targets, **start), World(), torch.device("cpu"))


def test_a_conversion_merges_the_adapters(folder, tmp_path):
    """Compared with transformers, and read back and compared row by row."""
    done = convert("dcp2hf", folder / "adapted", tmp_path / "hf", Options(verify=True))
    trained = open_model(folder / "adapted").model
    assert done.tensors == len(list(trained.parameters()))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    x = torch.arange(40).view(2, 20)
    with torch.no_grad():
        torch.testing.assert_close(trained(x), theirs(x).logits, atol=1e-5, rtol=1e-5)


def test_the_average_of_adapters_is_merged_too(folder, tmp_path):
    recipe = load(folder, "averaged", **{"run.init_from": str(folder / "base"), "ema.decay": 0.5})
    result = train(recipe)
    convert("dcp2hf", result.directory, tmp_path / "hf", Options(section="ema"))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    averaged = open_model(result.directory, weights=Weights.EMA).model
    last = open_model(result.directory).model
    x = torch.arange(40).view(2, 20)
    with torch.no_grad():
        torch.testing.assert_close(averaged(x), theirs(x).logits, atol=1e-5, rtol=1e-5)
        assert (averaged(x) - last(x)).abs().max() > 1e-4


def test_an_adapter_that_does_not_fit_its_weight_is_refused():
    weights = {"a.weight": (4, 6), "a.lora_a": (2, 5), "a.lora_b": (4, 2), "b.lora_a": (2, 6)}
    tensors = {name: InMemoryTensor(torch.zeros(shape)) for name, shape in weights.items()}
    with pytest.raises(CheckpointError, match=r"(?s)a\.weight.*\(2, 5\).*b\.weight.*None"):
        merge_tensors(Path("x"), tensors, LoRA(alpha=8.0))


def test_rows_are_merged_to_the_same_bits_however_they_are_cut():
    generator = torch.Generator().manual_seed(0)
    weight, down, up = (
        torch.randn(shape, generator=generator) for shape in ((200, 96), (8, 96), (200, 8))
    )
    tensors = {
        "a.weight": InMemoryTensor(weight),
        "a.lora_a": InMemoryTensor(down),
        "a.lora_b": InMemoryTensor(up),
    }
    rows = merge_tensors(Path("x"), tensors, LoRA(alpha=4.0))["a.weight"]
    whole = rows.read(0, 200)
    torch.testing.assert_close(whole, weight + up @ down * 0.5)
    for first, last in [(0, 7), (7, 130), (130, 200), (64, 128)]:
        assert torch.equal(rows.read(first, last), whole[first:last])


def test_the_command_line_writes_an_adapter(folder, tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["convert-ckpt", "dcp2peft", str(folder / "adapted"), str(tmp_path / "a"), "--json"])
    assert stop.value.code == 0
    assert json.loads(capsys.readouterr().out)["tensors"] == 2 * 7 * 2
    settings = json.loads((tmp_path / "a/adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(folder / "base")
    with pytest.raises(SystemExit) as stop:
        main(["convert-ckpt", "dcp2peft", str(folder / "base"), str(tmp_path / "b")])
    assert stop.value.code == 5
    assert "has no adapters" in capsys.readouterr().err


def test_adapters_start_from_a_hugging_face_folder(folder, tmp_path):
    theirs = their_model(our_model(vocab_size=320))
    theirs.save_pretrained(tmp_path / "hf")
    assert isinstance(AutoModelForCausalLM.from_pretrained(tmp_path / "hf"), torch.nn.Module)
    recipe = load(folder, "hf", **{"run.init_from": str(tmp_path / "hf"), "model.dim": 32})
    parts = assemble(recipe, World(), torch.device("cpu"))
    x = torch.arange(40).view(2, 20)
    with torch.no_grad():
        torch.testing.assert_close(parts.model(x), theirs(x).logits, atol=1e-5, rtol=1e-5)
    assert parts.model.layers[0].mlp.up.lora_a.std() > 0.05


def test_without_a_base_model_the_user_is_warned(folder, caplog):
    assemble(load(folder, "x"), World(), torch.device("cpu"))
    assert "without run.init_from" in caplog.text


def test_a_plain_run_does_not_start_from_adapters(folder):
    recipe = load(folder, "x", **{"lora.rank": 0, "run.init_from": str(folder / "adapted")})
    with pytest.raises(CheckpointError, match="lora_a is in the checkpoint but not here"):
        assemble(recipe, World(), torch.device("cpu"))


@pytest.mark.parametrize(
    ("pattern", "message", "hint"),
    [
        ("*.attention.w.weight", "matches no weight", 'did you mean "layers.'),
        ("head.*", "matches only what cannot have an adapter", ""),
        ("re:norm", "matches only what cannot have an adapter", ""),
    ],
)
def test_a_pattern_that_names_no_projection_is_an_error(pattern, message, hint):
    recipe = Recipe.model_validate({"lora": {"rank": 2, "targets": ["*.q.weight", pattern]}})
    with pytest.raises(RecipeError) as caught:
        build_model(recipe, recipe.tokenizer.build().vocab_size, torch.device("cpu"))
    (problem,) = caught.value.problems
    assert problem.key == "lora.targets.1"
    assert message in problem.message
    assert hint in problem.hint


def test_the_default_targets_adapt_attention_alone_where_blocks_have_experts_alone():
    recipe = Recipe.model_validate({"model": {"name": "mixtral"}, "lora": {"rank": 2}})
    built = build_model(recipe, recipe.tokenizer.build().vocab_size, torch.device("cpu"))
    trained = {name for name, weight in built.model.named_parameters() if weight.requires_grad}
    assert {name.split(".")[2] for name in trained} == {"attention"}
    assert len(trained) == 4 * 4 * 2


def test_a_broken_expression_is_found_by_validation(folder):
    with pytest.raises(RecipeError, match="is no regular expression"):
        load(folder, "x", **{"lora.targets": ["re:("]})
