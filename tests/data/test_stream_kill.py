"""Runs on streams: `kill -9`, other numbers of ranks and a lost cache change no number."""

import json
import random
import shutil
import time

import pytest

from tests.faults.test_kills import assert_same_run
from tests.train.processes import complaints, finish, rows, start, wait_for_lines

STEPS = 60
CHANCE = random.Random(3)
DOCUMENTS = [f"document {number} " * CHANCE.randrange(1, 9) for number in range(1500)]

RECIPE = """
[run]
steps = {steps}
dir = "{folder}"
name = "run"
seed = 5
[model]
dim = 48
n_layers = 2
n_heads = 4
n_kv_heads = 2
ffn_dim = 96
[data]
seq_len = 48
global_batch = 8
micro_batch = 2
packing = "documents"
cache_dir = "{folder}/cache"
[[data.sources]]
name = "jsonl"
path = "corpus.jsonl"
streaming = true
weight = 2.0
on_error = "skip"
[[data.sources]]
name = "parquet"
path = "corpus.parquet"
streaming = true
[[data.sources]]
name = "synthetic"
num_documents = 50
document_tokens = 40
split = "validation"
[optimizer]
lr = 1e-3
[schedule]
name = "constant"
warmup_steps = 5
[precision]
compute = "fp32"
[checkpoint]
interval = 3
mode = "async"
[evaluate]
interval = 20
steps = 2
[metrics]
interval = 1
"""


def small_windows():
    """Some dozens of windows a run rather than one."""
    from trainer.engine.data import windows

    windows.FIRST_WINDOW, windows.LARGEST_WINDOW, windows.ROWS_A_WINDOW = 1500, 3000, 1


def begin(recipe, world=1, attempt=0, overrides=()):
    return start(recipe, world, attempt, overrides, before=small_windows)


def write_recipe(folder, steps=STEPS):
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir()
    lines = [json.dumps({"text": text}) for text in DOCUMENTS]
    lines[400] = '{"text": 3}'
    lines[900] = "not JSON"
    (folder / "corpus.jsonl").write_text("\n".join(lines), encoding="utf-8")
    table = pa.table({"text": [text.upper() for text in DOCUMENTS]})
    pq.write_table(table, folder / "corpus.parquet", row_group_size=100)
    path = folder / "recipe.toml"
    path.write_text(RECIPE.format(steps=steps, folder=folder), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stream") / "reference"
    recipe = write_recipe(folder)
    assert finish(begin(recipe)) == [0], complaints(recipe)
    return folder


@pytest.mark.matrix
def test_kills_at_random_moments_leave_a_run_on_streams_bit_for_bit(tmp_path, reference):
    """The second time the cache is gone, as on another machine."""
    recipe = write_recipe(tmp_path / "killed")
    metrics = tmp_path / "killed" / "run" / "metrics.jsonl"
    chance = random.Random(1)
    for attempt in range(3):
        before = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
        processes = begin(recipe, attempt=attempt)
        wait_for_lines(metrics, before + chance.randrange(8, 16), processes)
        time.sleep(chance.uniform(0, 0.05))
        assert processes[0].is_alive(), complaints(recipe)
        processes[0].kill()
        processes[0].join()
        if attempt == 1:
            shutil.rmtree(tmp_path / "killed" / "cache")
    assert finish(begin(recipe, attempt=3)) == [0], complaints(recipe)
    assert_same_run(tmp_path / "killed", reference)


@pytest.mark.matrix
def test_a_run_on_streams_moves_between_numbers_of_ranks(tmp_path, reference):
    recipe = write_recipe(tmp_path / "moved")
    for attempt, (world, steps) in enumerate([(2, 30), (1, STEPS)]):
        until = [f"run.steps={steps}"]
        assert finish(begin(recipe, world, attempt, until)) == [0] * world, complaints(recipe)
    moved, expected = rows(tmp_path / "moved"), rows(reference)
    for key in ("step", "tokens"):
        assert [row[key] for row in moved] == [row[key] for row in expected]
    losses = [row["loss"] for row in moved]
    assert losses == pytest.approx([row["loss"] for row in expected], abs=1e-6)


def test_other_files_are_refused_on_resume(tmp_path):
    recipe = write_recipe(tmp_path / "changed", 6)
    assert finish(begin(recipe)) == [0]
    with (tmp_path / "changed" / "corpus.jsonl").open("a") as file:
        file.write('\n{"text": "one more"}')
    assert finish(begin(recipe, 1, 1, ["run.steps=9"])) == [2]
    assert "data: the content changed since the checkpoint of step 6" in complaints(recipe)
