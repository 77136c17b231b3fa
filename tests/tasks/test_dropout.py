"""Which hidden states dropout zeroes depends on seed, step and sample, and not on the rank."""

import numpy as np
import torch

from trainer.engine.data.record_samples import RecordSamples
from trainer.engine.data.tables import Data
from trainer.engine.tasks.classification.batch import make_collation
from trainer.engine.tasks.classification.config import SequenceClassification
from trainer.engine.tasks.classification.task import TextTask

TASK = SequenceClassification(labels=["a", "b"], dropout=0.5)


class Source:
    num_rows = 8

    def read(self, rows):
        return [{"tokens": np.arange(6), "labels": np.int64(row % 2)} for row in rows]


class Order:
    """Each epoch in the same order."""

    rows_per_epoch = 8

    def locate(self, samples):
        return np.zeros_like(samples), samples % 8


def keys_of(samples, seed=3):
    table = Data(seq_len=8, global_batch=8)
    collation = make_collation(TASK.name, 0, seed)
    rows = RecordSamples([Source()], Order(), ["x"], collation, table)
    rows.locate = Order().locate
    batch = rows.gather(np.array(samples)).to_batch()
    task = TextTask(loss=None, data=table, head=TASK.head())
    return task.arguments(batch).get("dropout_keys")


def test_a_sample_has_the_keys_of_its_number_in_the_run():
    whole = keys_of(range(16))
    assert len(whole.flatten().unique()) == whole.numel()
    assert torch.equal(keys_of([5, 6]), whole[5:7])
    assert torch.equal(keys_of([12]), whole[12:13])
    assert not torch.isin(keys_of(range(16), seed=4), whole).any()


def test_without_dropout_batches_have_no_keys():
    assert keys_of(range(4), seed=None) is None


def test_ranks_that_share_a_text_have_the_keys_of_their_positions():
    table = Data(seq_len=8, global_batch=8)
    rows = RecordSamples([Source()], Order(), ["x"], make_collation(TASK.name, 0, 3), table)
    rows.locate = Order().locate
    batch = rows.gather(np.arange(4)).to_batch()
    task = TextTask(loss=None, data=table, head=TASK.head())
    part = batch.split_sequence(lambda x: x[:, 2:5])
    keys = task.arguments(batch)["dropout_keys"]
    assert torch.equal(task.arguments(part)["dropout_keys"], keys[:, 2:5])
