"""What `trainer data` prints and returns, for good corpora and bad ones."""

import json
import os
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

import trainer
from tests.commands import run_trainer
from tests.corpus.stores import EOS
from trainer.cli.data import app
from trainer.engine.core.errors import DataError, RecipeError, TrainerError
from trainer.engine.corpus.inspect import find_duplicates, inspect_store, length_histogram
from trainer.engine.corpus.store import TokenStore


def run(*arguments: object, code: int = 0) -> Result:
    result = CliRunner().invoke(app, [str(each) for each in arguments])
    if isinstance(result.exception, TrainerError):
        raise result.exception
    assert result.exit_code == code, (result.output, result.exception)
    return result


def prepared(*arguments: object) -> Any:
    (row,) = json.loads(run("prepare", *arguments, "--json").stdout)
    return row


def inspected(*arguments: object, code: int = 0) -> Any:
    return json.loads(run("inspect", *arguments, "--json", code=code).stdout)


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    texts = ["one", "two", "one", "", "a longer one \x1b[31m", "one", "two"]
    file = tmp_path / "corpus.jsonl"
    file.write_text("".join(json.dumps({"text": text, "id": text}) + "\n" for text in texts))
    return file


def store_with(documents: list[list[int]]) -> TokenStore:
    tokens = [token for document in documents for token in [*document, EOS]]
    ends = np.cumsum([0, *(len(document) + 1 for document in documents)])
    return TokenStore(np.array(tokens, dtype=np.uint16), ends, EOS, "")


@given(st.lists(st.lists(st.integers(1, 2), max_size=3), min_size=1, max_size=40))
def test_duplicates_are_those_that_a_dictionary_finds(documents: list[list[int]]) -> None:
    store = store_with(documents)
    found = find_duplicates(store, np.diff(store.offsets) - 1)
    counted = Counter(tuple(document) for document in documents if document)
    again = {document: times - 1 for document, times in counted.items()}
    assert found.documents == sum(again.values())
    assert found.tokens == sum(len(document) * times for document, times in again.items())
    assert found.times == max(counted.values(), default=0)
    if counted:
        most_frequent = documents[found.most_frequent]
        assert counted[tuple(most_frequent)] == found.times
        assert documents.index(most_frequent) == found.most_frequent


@given(st.lists(st.integers(0, 5000), min_size=1, max_size=50))
def test_the_histogram_counts_every_document_in_its_bar(lengths: list[int]) -> None:
    bars = length_histogram(np.array(lengths))
    for bar in bars:
        inside = [length for length in lengths if bar.shortest <= length <= bar.longest]
        assert bar.documents == len(inside)
    assert sum(bar.documents for bar in bars) == len(lengths)
    assert all(a.longest + 1 == b.shortest for a, b in pairwise(bars))


def test_counts_of_a_small_corpus_are_right(lines: Path, tmp_path: Path) -> None:
    row = prepared(lines, "--out", tmp_path / "out")
    text_bytes = 3 * 3 + 2 * 3 + len("a longer one \x1b[31m")
    assert (row["num_documents"], row["empty"], row["skipped"]) == (6, 1, 0)
    assert row["text_bytes"] == text_bytes
    assert row["num_tokens"] == text_bytes + 6
    (found,) = inspected(tmp_path / "out", "--samples", 6)
    assert (found["documents"], found["tokens"], found["empty"]) == (6, text_bytes + 6, 1)
    assert found["duplicates"] == {
        "documents": 3, "tokens": 9, "most_frequent": 0, "times": 3,
    }  # fmt: skip
    assert found["quantiles"]["longest"] == len("a longer one \x1b[31m")
    assert list(found["samples"].values()) == [
        "one",
        "two",
        "one",
        "a longer one \x1b[31m",
        "one",
        "two",
    ]
    assert found["damaged"] == []


def test_what_is_printed_never_drives_the_terminal(lines: Path, tmp_path: Path) -> None:
    prepared(lines, "--out", tmp_path / "out")
    output = run("inspect", tmp_path / "out", "--samples", 10).output
    assert "\x1b" not in output
    assert r"a longer one \x1b[31m" in output
    assert "3 (9 tokens); document 0 is there 3 times" in output


@pytest.mark.parametrize("name", ["tokens-00000.bin", "offsets.npy"])
def test_damage_is_named_and_the_exit_code_says_it(lines: Path, tmp_path: Path, name: str) -> None:
    prepared(lines, "--out", tmp_path / "out")
    file = tmp_path / "out" / name
    content = bytearray(file.read_bytes())
    content[-11] ^= 1
    file.write_bytes(content)
    (found,) = inspected(tmp_path / "out", code=4)
    assert found["damaged"] == [name]
    assert f"damaged: {name}" in run("inspect", tmp_path / "out", code=4).output


def test_a_folder_that_lost_a_file_or_is_none_is_an_error(lines: Path, tmp_path: Path) -> None:
    prepared(lines, "--out", tmp_path / "out")
    os.truncate(tmp_path / "out" / "tokens-00000.bin", 4)
    for place in (tmp_path / "out", tmp_path / "absent", lines):
        with pytest.raises(DataError):
            run("inspect", place)


def test_an_empty_store_is_an_error() -> None:
    with pytest.raises(DataError, match="holds no documents"):
        inspect_store(TokenStore(np.empty(0, np.uint16), np.zeros(1, np.int64), EOS, ""), None)


def test_another_field_and_the_sources_own_keys_can_be_given(lines: Path, tmp_path: Path) -> None:
    first = prepared(lines, "--out", tmp_path / "a", "--field", "id")
    second = prepared(lines, "--out", tmp_path / "b", "--set", "field=id")
    assert first["num_tokens"] == second["num_tokens"]
    with pytest.raises(RecipeError, match='unknown key "fild"'):
        run("prepare", lines, "--out", tmp_path / "c", "--set", "fild=id")


def test_a_recipe_gives_its_tokenizer_and_a_folder_for_each_of_its_sources(
    lines: Path, tmp_path: Path
) -> None:
    recipe = tmp_path / "recipe.toml"
    (tmp_path / "text.txt").write_text("some text")
    recipe.write_text(
        "[run]\nsteps = 1\n"
        '[[data.sources]]\nname = "jsonl"\npath = "corpus.jsonl"\nweight = 3.0\n'
        '[[data.sources]]\nname = "synthetic"\n'
        '[[data.sources]]\nname = "text"\npath = "text.txt"\nsplit = "validation"\n'
    )
    out = tmp_path / "out"
    output = run("prepare", "--recipe", recipe, "--out", out).output
    assert sorted(path.name for path in out.iterdir()) == ["0.jsonl", "2.text"]
    assert "weight = 3.0" in output
    assert 'split = "validation"' in output
    run("prepare", recipe, "--out", tmp_path / "again")
    for name in ("0.jsonl", "2.text"):
        assert (tmp_path / "again" / name / "tokens-00000.bin").read_bytes() == (
            out / name / "tokens-00000.bin"
        ).read_bytes()
    row = prepared("--recipe", recipe, tmp_path / "text.txt", "--out", tmp_path / "one")
    assert row["num_tokens"] == len("some text") + 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "nothing to prepare"),
        (["{lines}", "--shard-tokens", "100000"], "not a multiple of 65536"),
        (["{lines}", "--on-error", "explode"], "on_error"),
        (["{lines}", "--tokenizer", "byts"], "bytes"),
        (["{lines}", "--source", "jsn"], "jsonl"),
        (["{lines}", "--source", "synthetic"], "path"),
        (["--recipe", "{lines}", "--on-error", "skip"], "sources given on the command line"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_read(
    lines: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    given = [each.format(lines=lines) for each in arguments]
    with pytest.raises(RecipeError) as error:
        run("prepare", *given, "--out", tmp_path / "out")
    assert message in error.value.render()
    assert not (tmp_path / "out").exists()


def test_inspecting_a_recipe_shows_each_source(lines: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        f'[run]\nsteps = 1\n[data]\ncache_dir = "{tmp_path / "cache"}"\n'
        '[[data.sources]]\nname = "jsonl"\npath = "corpus.jsonl"\n'
        '[[data.sources]]\nname = "synthetic"\nnum_documents = 5\n'
    )
    first, second = inspected(recipe)
    assert (first["documents"], second["documents"]) == (6, 5)
    assert first["samples"]["0"] == "one"


@pytest.mark.parametrize(
    ("recipe", "reads"),
    [
        ("supervised_debug", "samples of a data set"),
        ("sequence_classification_debug", "records (text, label)"),
    ],
)
@pytest.mark.parametrize("command", ["inspect", "prepare --out never-made"])
def test_a_recipe_whose_task_reads_no_documents_is_refused(
    tmp_path: Path, command: str, recipe: str, reads: str
) -> None:
    # In a process of its own: what a recipe's plugin registers stays in the process.
    path = Path(trainer.__file__).parent.absolute() / "recipes" / f"{recipe}.toml"
    done = run_trainer("data", *command.split(), path, folder=tmp_path)
    assert done.returncode == 2
    assert f"reads {reads}, and no documents" in done.stderr


def test_a_conversation_shows_special_tokens_and_what_counts_in_the_loss(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hé"}, {"role": "assistant", "content": "ho"}]
    (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    template = (
        "{% for m in messages %}<{{ m.role }}>{% generation %}{{ m.content }}{% endgeneration %}"
    )
    (tmp_path / "t.jinja").write_text(template + "{% endfor %}")
    (tmp_path / "recipe.toml").write_text(
        f'[run]\nsteps = 1\n[data]\npacking = "documents"\ncache_dir = "{tmp_path / "cache"}"\n'
        '[[data.sources]]\nname = "chat"\npath = "chat.jsonl"\ntemplate_file = "t.jinja"\n'
    )
    (found,) = inspected(tmp_path / "recipe.toml")
    pieces = [(piece["text"], piece["in_loss"]) for piece in found["loss_samples"]["0"]]
    assert "".join(text for text, _ in pieces) == "<user>hé<assistant>ho<|endoftext|>"
    # The template marks both contents as learned.
    expected = [("<user>", False), ("hé", True), ("<assistant>", False), ("ho<|endoftext|>", True)]
    assert pieces == expected
    output = run("inspect", tmp_path / "recipe.toml").output
    assert "»ho" in output
