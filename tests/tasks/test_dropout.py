"""Which hidden states dropout zeroes depends on seed, step and sample, and not on the rank."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import trainer
from trainer.engine.corpus.checksums import ALONE
from trainer.engine.data.record_samples import RecordSamples
from trainer.engine.data.tables import Data
from trainer.engine.tasks.classification.config import SequenceClassification
from trainer.engine.tasks.classification.task import TextTask
from trainer.engine.tasks.preference.config import Reward
from trainer.engine.tasks.preference.rewards import Rewards
from trainer.engine.tasks.tables import TaskData
from trainer.engine.tokenizers.byte_tokenizer import ByteTokenizer

RECIPES = Path(trainer.__file__).parent / "recipes"
CLASSES = SequenceClassification(labels=["a", "b"], dropout=0.5)
TABLE = Data(seq_len=8, global_batch=8)


class Texts:
    num_rows = 8

    def read(self, rows):
        return [{"tokens": np.arange(6), "labels": np.int64(row % 2)} for row in rows]


class Pairs:
    num_rows = 8

    def read(self, rows):
        parts = {"prompt": 2, "chosen": 4, "rejected": 3}
        return [{name: np.arange(size) for name, size in parts.items()} for _ in rows]


class Order:
    """Each epoch in the same order."""

    rows_per_epoch = 8

    def locate(self, samples):
        return np.zeros_like(samples), samples % 8


TASKS = {
    "classes": (CLASSES, Texts(), TextTask(loss=None, data=TABLE, head=CLASSES.head())),
    "reward": (Reward(dropout=0.5), Pairs(), Rewards(loss=None, score=None, data=TABLE)),
}


@pytest.fixture(params=TASKS)
def read(request):
    """Return the keys of a batch of these samples, or of a part of its positions."""
    config, source, task = TASKS[request.param]

    def read(samples, seed=3, ragged=False, part=slice(None)):
        collation = config.build_collation(ByteTokenizer(), None, ragged)
        rows = RecordSamples([source], Order(), ["x"], replace(collation, seed=seed), TABLE)
        rows.locate = Order().locate
        batch = rows.gather(np.array(samples)).to_batch()
        if part != slice(None):
            batch = batch.split_sequence(lambda x: x[:, part])
        return task.arguments(batch).get("dropout_keys"), batch.rows_per_sample

    return read


def test_a_sample_has_the_keys_of_its_number_in_the_run(read):
    whole, rows = read(range(16))
    assert len(whole.flatten().unique()) == whole.numel() / rows
    assert torch.equal(read([5, 6])[0], whole[5 * rows : 7 * rows])
    assert torch.equal(read([12])[0], whole[12 * rows : 13 * rows])
    assert not torch.isin(read(range(16), seed=4)[0], whole).any()


def test_without_dropout_batches_have_no_keys(read):
    assert read(range(4), seed=None)[0] is None


def test_ranks_that_share_a_row_have_the_keys_of_their_positions(read):
    assert torch.equal(read(range(4), part=slice(2, 5))[0], read(range(4))[0][:, 2:5])


def test_ragged_rows_have_the_keys_of_padded_ones(read):
    padded, _ = read(range(4))
    ragged, _ = read(range(4), ragged=True)
    assert ragged.shape[0] == 1
    assert torch.isin(ragged, padded).all()
    assert len(ragged.unique()) <= len(padded.unique())


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_task_with_dropout_gives_its_batches_the_seed(tmp_path, dropout):
    source = {"name": "jsonl", "path": str(RECIPES / "data" / "preferences.jsonl")}
    table = Data(seq_len=96, sources=[source], cache_dir=str(tmp_path))
    opened = Reward(dropout=dropout).build_data(TaskData(table, ByteTokenizer(), 3, "", ALONE))
    keys = opened.train.gather(np.arange(2)).to_batch().sample_keys
    assert (keys is not None) == (dropout > 0)
