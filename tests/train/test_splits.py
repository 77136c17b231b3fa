"""Further splits of an evaluation: all of their samples, and the score that is followed."""

import json

import pytest
import torch

from tests.train.plans import BASE, recipe_with
from trainer.engine.assemble.assemble import assemble
from trainer.engine.core.errors import RecipeError
from trainer.engine.data.batch import IGNORED
from trainer.engine.launch.environment import World
from trainer.engine.recipe.load import load_overrides
from trainer.engine.train.evaluate import validate
from trainer.engine.train.tables import Evaluate

SOURCE = 'name="a",sources=[{name="python"}]'


def write(folder, name, texts):
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return {"name": "jsonl", "path": str(path)}


def test_each_split_is_measured_whole_with_its_own_length(tmp_path):
    books = [write(tmp_path, "a", ["x" * 50] * 5), write(tmp_path, "b", ["yz" * 40] * 3)]
    splits = [
        {"name": "books", "sources": books, "steps": 0, "seq_len": 16, "micro_batch": 3},
        {"name": "first", "sources": books[:1], "steps": 1},
    ]
    data = BASE["data"] | {"cache_dir": str(tmp_path / "cache"), "packing": "concat"}
    recipe = recipe_with(evaluate={"steps": 0, "splits": splits}, data=data)
    parts = assemble(recipe, World(), torch.device("cpu"))
    assert [split.name for split in parts.splits] == ["validation", "books", "first"]
    _, whole, first = parts.splits
    labels = torch.cat([batch.labels.flatten() for batch in whole.batches])
    # Rows of 16 labels of the concatenated documents, each with its end-of-document token.
    assert (labels != IGNORED).sum() == (5 * 51 - 1) // 16 * 16 + (3 * 81 - 1) // 16 * 16
    assert all(batch.tokens.shape[1] == 16 for batch in whole.batches)
    assert first.batches[0].tokens.shape[1] == recipe.data.seq_len
    assert {"loss", "loss/0.jsonl", "loss/1.jsonl"} <= validate(parts, split=whole).keys()


def test_the_best_may_follow_a_split():
    split = {"name": "books", "sources": [{"name": "python"}]}
    table = Evaluate(metric="books.loss", splits=[split])
    assert (table.score_key, table.number_key) == ("books.loss", "loss")
    assert not table.is_maximized


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        (['evaluate.metric="bokks.loss"'], "no number of an evaluation"),
        ([f"evaluate.splits=[{{{SOURCE}}},{{{SOURCE}}}]"], 'named "a" already'),
        (
            ["parallel.pipeline=2", f"evaluate.splits=[{{seq_len=8,{SOURCE}}}]"],
            "rows of data.seq_len alone",
        ),
    ],
)
def test_what_cannot_be_measured_is_refused(settings, part):
    with pytest.raises(RecipeError) as caught:
        load_overrides(["run.steps=1", *settings])
    assert any(part in problem.message for problem in caught.value.problems)
