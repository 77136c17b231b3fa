"""What a run takes of the weights that it starts from."""

import pytest
import torch
from safetensors.torch import load_file

from tests.run.conftest import RECIPE
from trainer.cli import main as cli
from trainer.engine.core.errors import CheckpointError, RecipeError
from trainer.engine.core.text.expressions import ExpressionError
from trainer.engine.core.text.selection import Renaming, rename_function
from trainer.engine.inference.open import open_model
from trainer.engine.run.library import assemble, load_recipe


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Return a finished run of two blocks with averaged weights and a Hugging Face folder."""
    folder = tmp_path_factory.mktemp("source")
    (folder / "recipe.toml").write_text(RECIPE)
    settings = {
        "run.dir": folder, "model.n_layers": 2, "ema.decay": 0.5, "optimizer.lr": 0.1,
        "checkpoint.export": "hf", "checkpoint.export_dtype": "bf16", "precision.compute": "fp32",
    }  # fmt: skip
    with pytest.raises(SystemExit) as stop:
        cli.main(
            ["run", str(folder / "recipe.toml"), *(f"--set={k}={v}" for k, v in settings.items())]
        )
    assert stop.value.code == 0
    return folder / "r"


def weights(tmp_path, **settings):
    """Return the weights of a run of the recipe before its first step."""
    (tmp_path / "recipe.toml").write_text(RECIPE)
    values = {"run.dir": str(tmp_path), "model.n_layers": 2, "precision.compute": "fp32"}
    given = {key.replace("__", "."): value for key, value in settings.items()}
    recipe = load_recipe(tmp_path / "recipe.toml", values | given)
    return {name: weight.detach() for name, weight in assemble(recipe).model.named_parameters()}


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


def opened(source, kind="model"):
    model = open_model(source, weights=kind, dtype="fp32").model
    return {name: weight.detach() for name, weight in model.named_parameters()}


def test_averaged_weights_are_taken(tmp_path, source):
    found = weights(tmp_path, run__init_from=str(source), run__init__weights="ema")
    assert_equal(found, opened(source, "ema"))
    assert not torch.equal(found["embed.weight"], opened(source)["embed.weight"])


def test_averaged_weights_that_are_not_there_are_an_error(tmp_path, source, finished):
    settings = {"run__init__weights": "ema", "model__n_layers": 1}
    with pytest.raises(CheckpointError, match="holds no averaged weights"):
        weights(tmp_path, run__init_from=str(finished), **settings)
    with pytest.raises(CheckpointError, match="is no checkpoint of ours: it"):
        weights(tmp_path, run__init_from=str(source / "hf"), run__init__weights="ema")


@pytest.mark.parametrize("folder", [".", "hf"])
def test_excluded_weights_keep_their_initial_values(tmp_path, source, folder):
    exclude = ["head.*", "re:^layers[.]1[.].*norm"]
    settings = {"run__init_from": str(source / folder), "run__init__exclude": exclude}
    found, fresh, trained = weights(tmp_path, **settings), weights(tmp_path), opened(source)
    if folder == "hf":
        trained = {name: weight.bfloat16().float() for name, weight in trained.items()}
    left = {
        name for name in found if name.startswith("head") or ("layers.1" in name and "norm" in name)
    }
    assert len(left) >= 3
    assert_equal(found, {name: (fresh if name in left else trained)[name] for name in found})


@pytest.mark.parametrize("folder", [".", "hf"])
def test_without_embedding_and_head_the_vocabulary_may_be_another(tmp_path, source, folder):
    settings = {"run__init_from": str(source / folder), "model__vocab_size": 300}
    with pytest.raises(CheckpointError, match="embed"):
        weights(tmp_path, **settings)
    found = weights(tmp_path, **settings, run__init__exclude=["embed.weight", "head.proj.weight"])
    assert found["embed.weight"].shape[0] == 300


@pytest.mark.parametrize(
    ("folder", "prefix"), [(".", "layers"), ("hf", "model.layers")], ids=["native", "hf"]
)
def test_weights_of_other_names_are_renamed(tmp_path, source, folder, prefix):
    rename = [
        {"match": f"{prefix}.0.*", "to": "unused.*"},
        {"match": rf"re:{prefix}\.1\.(.*)".replace(".l", r"\.l"), "to": rf"{prefix}.0.\1"},
    ]
    settings = {"run__init__rename": rename, "run__init__exclude": ["unused.*"]}
    if folder == "hf":
        config = source / "hf" / "config.json"
        text = config.read_text()
        config.write_text(text.replace('"num_hidden_layers": 2', '"num_hidden_layers": 1'))
    found = weights(tmp_path, run__init_from=str(source / folder), model__n_layers=1, **settings)
    if folder == "hf":
        config.write_text(text)
    trained = opened(source)
    for name, weight in found.items():
        there = trained[name.replace("layers.0", "layers.1")]
        assert torch.equal(weight, there.bfloat16().float() if folder == "hf" else there)


def test_what_is_missing_is_listed(tmp_path, source):
    with pytest.raises(CheckpointError) as error:
        weights(tmp_path, run__init_from=str(source), model__n_layers=3)
    assert "layers.2.attention" in error.value.message
    with pytest.raises(CheckpointError) as error:
        weights(tmp_path, run__init_from=str(source), run__init__rename=[
            {"match": "head.proj.weight", "to": "embed.weight"}
        ])  # fmt: skip
    assert "are both embed.weight here" in error.value.message


def test_a_pattern_that_matches_nothing_is_named(tmp_path, source):
    with pytest.raises(RecipeError) as error:
        weights(
            tmp_path,
            run__init_from=str(source),
            run__init__exclude=["heads.*"],
            run__init__rename=[{"match": "blocks.*", "to": "layers.*"}],
        )
    keys = [problem.key for problem in error.value.problems]
    assert keys == ["run.init.exclude.0", "run.init.rename.0.match"]


@pytest.mark.parametrize(
    ("match", "to", "name", "expected"),
    [
        ("a.*.c", "x.*", "a.b.c", "x.b"),
        ("*.*", "*.new.*", "a.b", "a.new.b"),
        ("a.b", "c", "a.b", "c"),
        ("a.b", "c", "axb", None),
        (r"re:block(\d)\.(.*)", r"layers.\1.\2", "block3.w", "layers.3.w"),
        ("re:lock", "x", "block", None),
    ],
)
def test_names_are_renamed_by_pattern(match, to, name, expected):
    assert rename_function(Renaming(match, to))(name) == expected


@pytest.mark.parametrize(("match", "to"), [("a.*", "*.*"), ("re:a(.)", r"\2"), ("re:(", "a")])
def test_a_renaming_that_cannot_work_is_refused(match, to):
    with pytest.raises(ExpressionError):
        rename_function(Renaming(match, to))


def test_the_export_has_the_dtype_that_is_asked_for(source):
    found = load_file(source / "hf" / "model.safetensors")
    assert {weight.dtype for weight in found.values()} == {torch.bfloat16}
    trained = opened(source)
    assert torch.equal(found["model.embed_tokens.weight"], trained["embed.weight"].bfloat16())
    assert '"bfloat16"' in (source / "hf" / "config.json").read_text()
