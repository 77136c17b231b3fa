"""`trainer docs WORD`: what it finds, and by which names."""

import json
import re

import pytest
import tomli

import trainer.cli.main as cli
from tests.commands import run_in_process
from tests.docs.walk import ROOT
from trainer.engine.core.errors import ExitCode
from trainer.engine.recipe.changes import compare
from trainer.engine.recipe.load import load_recipe
from trainer.engine.recipe.schema import REGISTRIES, Recipe


@pytest.fixture
def docs(capsys):
    """Run `trainer docs` in this process; return exit code, output and errors."""

    def docs(*arguments):
        return run_in_process(capsys, "docs", *arguments)

    return docs


def rows(text):
    """Return the two-column table of a key's help."""
    return dict(re.findall(r"^(\S.*?) {2,}(\S.*)$", text, re.MULTILINE))


def test_a_key_is_shown_with_type_default_and_who_has_it(docs):
    code, out, _ = docs("optimizer.lr")
    assert code == 0
    first, second = out.splitlines()[:2]
    assert first == "optimizer.lr"
    assert "peak learning rate; the schedule multiplies it (adam, adamw, " in second
    shown = rows(out)
    assert shown["type"] == "number >= 0"
    assert "0.0003 (adam, adamw" in shown["default"]
    assert "0.1 (decoupled_sgdw, sgd" in shown["default"]
    assert shown["components"].split(", ") == list(REGISTRIES["optimizer"])
    assert shown["on resume"] == "only with --allow-changed optimizer.lr"


def test_a_key_is_shown_with_the_recipes_that_set_it(docs):
    shown = rows(docs("run.steps")[1])
    runs = {p.stem: tomli.loads(p.read_text())["run"] for p in (ROOT / "recipes").glob("*.toml")}
    given = {name: str(run["steps"]) for name, run in runs.items() if "steps" in run}
    assert given
    assert {name: shown[f"in {name}"] for name in given} == given


def test_a_recipe_that_extends_shows_what_it_inherits(docs):
    assert rows(docs("adamw.eps")[1])["in llama3_8b"] == "1e-08"


def test_a_key_that_only_another_component_sets_is_not_attributed(docs):
    assert not [line for line in rows(docs("sgd.lr")[1]) if line.startswith("in ")]


@pytest.mark.parametrize(
    "word", ["optimizer.betas", "adamw.betas", "optimizer.adam.betas"]
)  # fmt: skip
def test_a_key_of_a_component_goes_by_three_names(docs, word):
    code, out, _ = docs(word)
    assert code == 0
    assert out.startswith("optimizer.betas\ndecay of the running means")


@pytest.mark.parametrize(
    "word", ["data.sources.weight", "data.sources.0.weight", "source.weight", "jsonl.weight"]
)
def test_a_key_in_a_list_needs_no_number(docs, word):
    code, out, _ = docs(word)
    assert code == 0
    assert rows(out)["on resume"] == "only with --allow-changed data.sources.0.weight"


@pytest.mark.parametrize(
    ("key", "changed", "is_free"),
    [
        ("metrics.interval", 7, True),
        ("checkpoint.keep", 7, True),
        ("parallel.shard", 1, True),
        ("optimizer.lr", 0.5, False),
        ("data.seq_len", 32, False),
        ("run.seed", 7, False),
    ],
)
def test_what_is_said_about_resuming_is_what_resuming_does(docs, key, changed, is_free):
    recipe = load_recipe(ROOT / "recipes/llama3_debug.toml").recipe
    table, field = key.split(".")
    old = recipe.model_dump()
    new = {**old, table: {**old[table], field: changed}}
    assert (compare(old, new) == []) == is_free
    assert rows(docs(key)[1])["on resume"].startswith("may change" if is_free else "only with")


@pytest.mark.parametrize("table", [name for name in Recipe.model_fields if name != "model"])
def test_every_table_has_help(docs, table):
    assert docs(table)[0] == 0


def test_a_word_with_two_meanings_shows_both(docs):
    out = docs("checkpoint")[1]
    assert out.startswith("[checkpoint]\n")
    assert "\ntrainer checkpoint verify " in out


def test_a_sub_command_has_help_of_its_own(docs):
    out = docs("checkpoint", "prune")[1]
    assert out.startswith("trainer checkpoint prune ")
    assert "--keep" in out
    assert "verify" not in out


def test_flavors_are_the_values_that_a_model_takes(docs):
    assert '"8b"' in rows(docs("model.flavor")[1])["type"]


def test_an_exit_code_is_explained(docs):
    assert docs("75")[1].split(None, 1) == ["75", ExitCode.STOPPED_AND_SAVED.meaning + "\n"]
    lines = docs("exit-codes")[1].splitlines()
    assert [int(line.split()[0]) for line in lines] == sorted(ExitCode)


def test_what_a_recipe_extends_is_explained(docs):
    assert rows(docs("extends")[1])["type"] == "list of strings"


@pytest.mark.parametrize(
    ("written", "word"),
    [("[optimizer]", "optimizer"), ("[[data.sources]]", "data.sources"), ("trainer run", "run")],
)
def test_a_word_may_be_written_as_in_a_recipe_or_a_shell(docs, written, word):
    assert docs(*written.split()) == docs(word)


@pytest.mark.parametrize("key", ["optimizer.groups", "data.sources", "parallel.fsdp"])
def test_of_a_table_no_values_are_shown(docs, key):
    assert "a table" not in docs(key)[1]


def test_without_a_word_it_lists_what_there_is(docs):
    assert docs("") == docs()
    topics = json.loads(docs("--json")[1])
    assert topics["command"] == [*cli.COMMANDS]
    for kind, registry in REGISTRIES.items():
        assert topics[kind] == [*registry]
    for words in topics.values():
        for word in words:
            assert docs(word)[0] == 0, word


@pytest.mark.parametrize(
    ("word", "nearest"),
    [
        ("optimizer.lrr", "optimizer.lr"),
        ("chekpoint", "checkpoint"),
        ("adamw.beta", "adamw.betas"),
        ("lama3_debug", "llama3_debug"),
        ("seq_len", "data.seq_len"),
        ("extend", "extends"),
        ("generat", "generate"),
    ],
)
def test_an_unknown_word_gets_the_nearest(docs, word, nearest):
    code, out, err = docs(word)
    assert (code, out) == (2, "")
    assert err.startswith("error: nothing is called ")
    assert re.search(rf'did you mean "?{re.escape(nearest)}\b', err)


def test_json_has_one_entry_for_each_component_that_has_the_key(docs):
    found = json.loads(docs("optimizer.lr", "--json")[1])
    assert {each["component"]: each["default"] for each in found["keys"]}["sgd"] == "0.1"
    table = json.loads(docs("precision", "--json")[1])["tables"][0]
    keys = [each["key"] for each in table["keys"]]
    assert keys == ["compute", "parameters", "stochastic_rounding", "reduce", "float8", "mx"]


def test_a_folder_that_cannot_be_written_is_said(docs, tmp_path):
    (tmp_path / "file").write_text("")
    code, _, err = docs("--write", str(tmp_path / "file" / "below"))
    assert code == 3
    assert "cannot be written" in err
