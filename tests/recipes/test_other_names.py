"""Names of other trainers are answered with the name here, and far ones with nothing."""

import re

import pytest

from trainer.cli import main as cli
from trainer.engine.core.errors import RecipeError, nearest
from trainer.engine.recipe import other_names
from trainer.engine.recipe.documents.reference import keys_called, sections, tables_called
from trainer.engine.recipe.load import load_recipe
from trainer.engine.recipe.schema import REGISTRIES


def refused(tmp_path, text):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(text)
    with pytest.raises(RecipeError) as caught:
        load_recipe(recipe)
    return caught.value.render()


def said(capsys, *words):
    with pytest.raises(SystemExit) as stop:
        cli.main(list(words))
    assert stop.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("name", other_names.KEYS)
def test_a_name_leads_to_keys_that_there_are(name):
    text = other_names.KEYS[name]
    keys = re.findall(r"[a-z_]+(?:\.[a-z_]+)+", text)
    tables = re.findall(r"\[([a-z_.]+)\]", text)
    assert keys or tables
    assert all(keys_called(key) or tables_called(key) for key in keys)
    assert {*tables} <= {section.table for section in sections()}
    assert name == name.lower()


@pytest.mark.parametrize("kind", other_names.COMPONENTS)
def test_a_component_leads_to_components_that_there_are(kind):
    for name, ours in other_names.COMPONENTS[kind].items():
        assert name not in REGISTRIES[kind]
        firsts = [
            part.split()[0].strip(",") for part in re.sub(r" \(.*?\)", "", ours).split(" or ")
        ]
        assert set(firsts) <= set(REGISTRIES[kind]), name


def test_a_command_leads_to_a_command():
    for name, ours in other_names.COMMANDS.items():
        assert name not in cli.COMMANDS
        assert ours.split()[0] in [*cli.COMMANDS, "--help"]


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("[run]\nsteps = 1\nmax_iters = 3", 'unknown key "max_iters"; write run.steps'),
        ("[optimizer]\nlearning_rate = 1", "write optimizer.lr"),
        ("[training]\nsteps = 1\nlocal_batch_size = 2", "local_batch_size: write data.micro_batch"),
        ("[data]\nbatch_size = 2", "write data.global_batch (sequences of an optimizer step"),
        ('[activation_checkpoint]\nmode = "full"', "mode: write memory.recompute"),
        ('[optimizer]\nname = "AdamW"', 'did you mean "adamw"?'),
        ('[model]\nname = "llama"', "write llama3 (also for Llama 1 and 2) or llama4"),
        ('[model]\nname = "gemma"', "write gemma2 or gemma3 (Gemma 1 is not there)"),
        ('[schedule]\nname = "cosine_with_warmup"', "write cosine"),
    ],
)
def test_a_recipe_in_other_words_is_told_ours(tmp_path, text, hint):
    assert hint in refused(tmp_path, f"{text}\n")


def test_a_yaml_file_is_no_recipe(tmp_path):
    (tmp_path / "recipe.yaml").write_text("a: 3\n")
    with pytest.raises(RecipeError, match="a recipe is a TOML file"):
        load_recipe(tmp_path / "recipe.yaml")


def test_the_command_line_knows_other_words_too(capsys):
    recipe = "recipes/llama3_debug.toml"
    assert "trainer run RECIPE" in said(capsys, "run", recipe, "--config", "x")
    assert "resumes from its newest checkpoint" in said(capsys, "run", recipe, "--resume")
    assert "optimizer.lr; --set" in said(capsys, "run", recipe, "--learning-rate", "1")
    assert "write optimizer.lr" in said(capsys, "validate", recipe, "--set=learning_rate=1")
    assert "here it is run." in said(capsys, "train", recipe)
    assert "here it is optimizer.lr" in said(capsys, "docs", "learning_rate")
    assert "here it is llama3" in said(capsys, "list", "model", "llama")
    assert "No such option: --nosuch" in said(capsys, "run", recipe, "--nosuch")


@pytest.mark.parametrize("name", ["llama3_debug", "llama3_8b.toml", "elsewhere/moe_1b.toml"])
def test_a_shipped_recipe_is_written_first(name):
    stem = name.split("/")[-1].removesuffix(".toml")
    with pytest.raises(RecipeError) as caught:
        load_recipe(name)
    assert f"trainer new {stem}.toml --from {stem}" in caught.value.render()


def test_no_suggestion_is_better_than_a_misleading_one():
    assert nearest("max_iters", ["gc_interval", "steps"]) == ""
    assert nearest("bert", ["olmo2", "qwen2", "mixtral"]) == ""
    assert nearest("mistrall", ["mistral", "mixtral"]) == 'did you mean "mistral"?'
    assert nearest("acc", ["accuracy", "auroc"]) == 'did you mean "accuracy"?'
    assert nearest("SGD", ["adamw", "sgd"]) == 'did you mean "sgd"?'
