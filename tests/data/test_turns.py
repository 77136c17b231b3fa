"""Training splits in turn: the order of steps and samples, as one would write it down."""

import json
import random
from contextlib import closing
from itertools import islice

import numpy as np
import pytest

from tests.recipes.test_task_checks import load, problems
from trainer.engine.assemble.training import open_training
from trainer.engine.core.errors import RecipeError
from trainer.engine.corpus.checksums import ALONE
from trainer.engine.data.dataset import Turn, Turns
from trainer.engine.data.loader import TurnLoader
from trainer.engine.data.tables import Data
from trainer.engine.recipe.changes import compare, resume_policy
from trainer.engine.recipe.load import load_overrides
from trainer.engine.tasks.language_modeling.config import LanguageModeling
from trainer.engine.tasks.tables import TaskData
from trainer.engine.tokenizers.byte_tokenizer import ByteTokenizer

A = 'name="a",sources=[{name="python"}]'


def text(folder, name, length):
    """Write a file without line ends; no two stretches of it are equal."""
    path = folder / f"{name}.txt"
    path.write_text("".join(chr(33 + (i * i // 7 + i) % 90) for i in range(length)))
    return {"name": "text", "path": str(path)}


def opened(folder, splits, seed=5, **changes):
    table = {
        "seq_len": 8,
        "global_batch": 4,
        "micro_batch": 2,
        "validation_fraction": 0.0,
        "cache_dir": str(folder / "cache"),
        "splits": splits,
    }
    data = TaskData(Data.model_validate(table | changes), ByteTokenizer(), seed, "", ALONE)
    return open_training(LanguageModeling(), data)


def steps_of(data, count, *, first=0, ranks=1):
    """Return the rows of tokens of each step: those of all ranks, micro batch by micro batch."""
    found = []
    for rank in range(ranks):
        with closing(TurnLoader(data, rank, ranks).steps(first)) as steps:
            found.append([[b.tokens.tolist() for b in step] for step in islice(steps, count)])
    return [
        [row for batches in zip(*step, strict=True) for batch in batches for row in batch]
        for step in zip(*found, strict=True)
    ]


def rows_of(folder, name, length):
    """Return the rows of a file's tokens: stretches that overlap by the token to be told."""
    ids = [*(folder / f"{name}.txt").read_bytes(), 256]
    return [ids[i : i + length] for i in range(0, len(ids) - length, length)]


def test_the_numbers_of_steps_and_samples_are_those_of_a_list():
    draw = random.Random(0)
    for _ in range(30):
        tables = [Data(global_batch=draw.randint(1, 5)) for _ in range(3)]
        turns = [Turn("", draw.randint(1, 4), table, None) for table in tables]
        order = Turns(turns, 1)
        listed = [i for i, turn in enumerate(turns) for _ in range(turn.steps)] * 3
        samples = 0
        for batch, split in enumerate(listed):
            assert order.locate(batch) == (split, listed[:batch].count(split))
            assert order.count_samples(batch) == samples
            size = turns[split].table.global_batch
            assert [order.find_batch(samples + i) for i in (0, size - 1)] == [batch, batch]
            samples += size


@pytest.mark.parametrize("workers", [0, 1])
def test_splits_follow_each_other_and_continue_where_they_were(tmp_path, workers):
    splits = [
        {"name": "a", "sources": [text(tmp_path, "a", 88)], "steps": 2},
        {
            "name": "b",
            "sources": [text(tmp_path, "b", 80)],
            "seq_len": 16,
            "global_batch": 2,
            "micro_batch": 1,
        },
    ]
    data = opened(tmp_path, splits, shuffle=False, workers=workers)
    short, long = rows_of(tmp_path, "a", 8), rows_of(tmp_path, "b", 16)
    assert (len(short), len(long)) == (11, 5)
    # A pass over b is two whole batches; its fifth row is the first one of the next turn.
    order = [(short, 4), (short, 4), (long, 2), (long, 2)] * 2
    expected, positions = [], {8: 0, 16: 0}
    for rows, size in order:
        start = positions[len(rows[0])]
        expected.append([rows[i % len(rows)] for i in range(start, start + size)])
        positions[len(rows[0])] += size
    assert steps_of(data, 8) == expected
    assert steps_of(data, 3, first=5, ranks=2) == expected[5:]
    assert data.steps_per_epoch == 4
    loader = TurnLoader(data, 0, 1)
    assert loader.describe_position(7) == {"samples": 4 * 4 + 3 * 2, "split": "b"}
    assert loader.describe_samples(6) == {
        "b.0.text": {"samples": [4, 5], "epochs": [0, 1], "rows": [4, 0]}
    }


def test_each_epoch_of_a_split_has_an_order_of_its_own(tmp_path):
    source = text(tmp_path, "a", 128)
    splits = [{"name": name, "sources": [source]} for name in "ab"]
    steps = steps_of(opened(tmp_path, splits), 16)
    orders = [[row for step in steps[n : n + 4] for row in step] for n in (0, 4, 8, 12)]
    rows = rows_of(tmp_path, "a", 8)
    assert all(sorted(order) == sorted(rows) for order in orders)
    assert len({json.dumps(order) for order in orders}) == 4


def test_what_a_split_holds_out_no_other_split_trains_on(tmp_path):
    source = text(tmp_path, "a", 400)
    splits = [{"name": f"s{n}", "sources": [source], "seq_len": n} for n in (8, 64)]
    data = opened(tmp_path, splits, validation_fraction=0.01, global_batch=1)
    ids = [*(tmp_path / "a.txt").read_bytes(), 256]
    for length, held_out, trained in zip((8, 64), data.validation, data.turns, strict=True):
        # The tail is a row of the longest split, in both.
        tail, body = ids[401 - 65 :], ids[: 401 - 65]
        for samples, part in ((held_out[1], tail), (trained.opened.train, body)):
            rows = samples.gather(np.arange(samples.rows_per_epoch)).tokens.tolist()
            starts = range(0, len(part) - length, length)
            assert sorted(rows) == sorted(part[start : start + length] for start in starts)


def test_losses_of_sources_are_numbered_among_those_of_all_splits(tmp_path):
    files = [text(tmp_path, name, 200) for name in "abc"]
    splits = [
        {"name": "one", "sources": [files[0] | {"label": "books"}]},
        {"name": "two", "sources": [files[1], files[2] | {"label": "books"}]},
    ]
    data = opened(tmp_path, splits)
    assert list(data.separate_labels) == ["books", "two.0.text"]
    for number, ids in enumerate([{0}, {0, 1}]):
        rows = data.turns[number].opened.train.gather(np.arange(8))
        assert set(rows.sources.tolist()) == ids


def test_a_split_that_fills_no_batch_says_so(tmp_path):
    with pytest.raises(RecipeError) as caught:
        opened(tmp_path, [{"name": "a", "sources": [text(tmp_path, "a", 20)]}])
    (problem,) = caught.value.problems
    assert (problem.key, problem.message) == ("data.splits.0", "2 rows do not fill one batch of 4")


STREAM = '{name="text",path="x.txt",streaming=true}'
WRONG = [
    ([f"data.splits=[{{{A}}},{{{A}}}]"], "data.splits.1.name", "already"),
    ([f"data.splits=[{{{A}}}]", 'data.sources=[{name="python"}]'], "data.sources", "beside"),
    ([f'data.splits=[{{name="a",sources=[{STREAM}]}}]'], "data.splits.0", "no last row"),
    ([f"data.splits=[{{seq_len=9000,{A}}}]"], "data.splits.0.seq_len", "max_seq_len"),
    (
        [f"data.splits=[{{seq_len=64,{A}}}]", "parallel.pipeline=2"],
        "data.splits.0.seq_len",
        "the stages of a pipeline",
    ),
    (
        ['data.splits=[{name="a",sources=[{name="python",split="validation"}]}]'],
        "data.splits.0.sources",
        'no source has split = "train"',
    ),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "key", "part"), WRONG)
def test_what_does_not_fit_is_refused_at_its_place(settings, key, part):
    with pytest.raises(RecipeError) as caught:
        load_overrides(["run.steps=1", *settings])
    assert key in [problem.key for problem in caught.value.problems if part in problem.message]


def test_records_that_one_split_drops_would_shift_what_is_held_out(tmp_path):
    source = '[[data.splits.sources]]\nname = "jsonl"\npath = "a.jsonl"\n'
    splits = '[[data.splits]]\nname = "a"\n' + source
    splits += '[[data.splits]]\nname = "b"\nseq_len = 64\n' + source
    task = '[task]\nname = "sequence_classification"\nlabels = ["x", "y"]\n[data]\n'
    found = dict(problems(tmp_path, task + 'on_long = "drop"\n' + splits))
    assert "drop other records" in found["data.on_long"]
    load(tmp_path, task + 'on_long = "truncate"\n' + splits)


def test_splits_change_training_but_for_labels_and_micro_batches():
    def recipe(*settings):
        given = [f"data.splits=[{{{A}}}]", *settings]
        return load_overrides(["run.steps=1", *given]).recipe.model_dump()

    free = ["data.splits.0.micro_batch=1", 'data.splits.0.sources.0.label="x"']
    assert compare(recipe(), recipe(*free)) == []
    ((key, *_),) = compare(recipe(), recipe("data.splits.0.steps=3"))
    assert key == "data.splits.0.steps"
    assert compare(recipe(), recipe("data.splits.0.steps=3"), ["data.splits"]) == []
    assert resume_policy("data.splits.0.micro_batch") == "may change"


def test_the_largest_split_has_most_tokens_in_a_micro_batch():
    sizes = [(64, 8), (256, 2), (512, 1), (96, 4)]
    splits = [
        {
            "name": f"s{length}",
            "sources": [{"name": "python"}],
            "seq_len": length,
            "micro_batch": rows,
        }
        for length, rows in sizes
    ]
    data = Data(splits=splits)
    assert (data.largest.seq_len, data.largest.micro_batch) == (512, 1)
