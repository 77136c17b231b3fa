"""Conversations in Parquet files and in datasets are those of the same JSON lines."""

import json

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.sources.chats import TALK, chats
from trainer import load_recipe, train
from trainer.engine.core.errors import DataError, RecipeError
from trainer.engine.recipe.load import load_overrides
from trainer.engine.sources.documents import DocumentFault
from trainer.engine.tokenizers.byte_tokenizer import ByteTokenizer

ANSWER = {"role": "assistant", "content": "ho"}
TABLES = {
    "messages": [{"messages": TALK}, {"messages": [{"role": "user", "content": "hi"}, ANSWER]}],
    "pairs": [{"prompt": "hi", "completion": "ho"}, {"prompt": "2 + 2?", "completion": "4"}],
    "lists": [{"prompt": [{"role": "user", "content": "hi"}], "completion": [ANSWER]}],
    "alpaca": [
        {"instruction": "Add", "input": "2 and 3", "output": "5"},
        {"instruction": "Say hi", "input": "", "output": "hi", "system": None},
    ],
}


def documents(path, **settings):
    source = chats(path, **settings).for_tokenizer(ByteTokenizer())
    return list(source.documents())


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("rows", TABLES.values(), ids=TABLES)
@pytest.mark.parametrize("kind", ["parquet", "folder of parquet", "saved", "saved splits"])
def test_rows_are_the_documents_of_the_same_lines(rows, kind, tmp_path):
    lines = write_lines(tmp_path / "a.jsonl", rows)
    table = pa.Table.from_pylist([{"id": 7, **row} for row in rows])
    place, settings = tmp_path / "rows", {}
    if "parquet" in kind:
        place.mkdir()
        pq.write_table(table, place / "a.parquet", row_group_size=1)
        place = place / "a.parquet" if kind == "parquet" else place
    elif kind == "saved":
        datasets.Dataset(table).save_to_disk(place)
    else:
        splits = datasets.DatasetDict({"train": datasets.Dataset(table.slice(0, 1))})
        splits["test"] = datasets.Dataset(table)
        splits.save_to_disk(place)
        settings = {"split_name": "test"}
    found = documents(place, **settings)
    assert found == documents(lines)
    assert len(found) == len(rows)
    source = chats(place, **settings).for_tokenizer(ByteTokenizer())
    (first, *_), other = source.parts(), chats(lines).for_tokenizer(ByteTokenizer())
    assert next(iter(source.read_from(first, 0))) == found[0]
    assert source.fingerprint() != other.fingerprint()
    assert source.content_fingerprint()


def test_what_cannot_be_read_is_named_with_its_row(tmp_path):
    rows = [{"messages": [ANSWER]}, {"messages": None}, TABLES["messages"][1]]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    wrong, empty, right = documents(tmp_path / "a.parquet")
    assert str(wrong).startswith(f"{tmp_path}/a.parquet, row 1: messages[0]: role 'assistant'")
    assert isinstance(empty, DocumentFault)
    assert 'row 2: no field "messages"' in str(empty)
    assert not isinstance(right, DocumentFault)
    pq.write_table(pa.Table.from_pylist([{"talk": "x"}] * 2), tmp_path / "b.parquet")
    first = documents(tmp_path / "b.parquet")[0]
    reason = 'no column "messages", nor prompt and completion or instruction and output'
    assert f"row 1: {reason}; there is: talk" in str(first)
    datasets.Dataset.from_list([{"talk": "x"}]).save_to_disk(tmp_path / "saved")
    with pytest.raises(DataError, match='saved: no column "messages", nor prompt'):
        documents(tmp_path / "saved")


def test_a_run_finetunes_on_rows_and_a_table_names_one_place(tmp_path):
    pq.write_table(pa.Table.from_pylist(TABLES["pairs"] * 20), tmp_path / "a.parquet")
    recipe = tmp_path / "chat.toml"
    recipe.write_text(
        "[run]\nsteps = 2\n[model]\ndim = 32\nn_layers = 1\n[data]\nseq_len = 64\n"
        'global_batch = 4\nmicro_batch = 4\npacking = "documents"\nvalidation_fraction = 0.0\n'
        '[[data.sources]]\nname = "chat"\npath = "a.parquet"\ntemplate = "chatml"\n'
    )
    folders = {"run.dir": str(tmp_path / "runs"), "data.cache_dir": str(tmp_path / "cache")}
    result = train(load_recipe(recipe, folders))
    assert [row["step"] for row in result.rows if row["kind"] == "train"][-1] == 2
    for keys in ("", ', path = "a", repo = "b"'):
        with pytest.raises(RecipeError, match="give either path"):
            load_overrides(["run.steps=1", f'data.sources=[{{name = "chat"{keys}}}]'])
