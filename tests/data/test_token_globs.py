"""A glob of folders of tokens is one source, whose rows are those of the folders."""

import numpy as np
import pytest

from tests.data.test_dataset import rows_of
from trainer.engine.core.errors import DataError
from trainer.engine.corpus.configs import TokensSource
from trainer.engine.corpus.store import StoreWriter
from trainer.engine.corpus.tokenise import make_chunk
from trainer.engine.data.dataset import open_data
from trainer.engine.data.tables import Data
from trainer.engine.tokenizers.byte_tokenizer import ByteTokenizer

PACKINGS = ["concat", "documents", "none", "ragged"]


@pytest.fixture
def folders(tmp_path):
    """Three folders of unequal sizes, whose tokens differ."""
    generator = np.random.default_rng(0)
    for number, count in enumerate([9, 40, 21]):
        with StoreWriter(tmp_path / f"part-{number}", ByteTokenizer()) as writer:
            sizes = generator.integers(5, 60, count)
            documents = [generator.integers(0, 256, size).astype(np.uint16) for size in sizes]
            writer.write(make_chunk(ByteTokenizer(), documents))
            writer.finish()
    (tmp_path / "part-x").mkdir()
    return tmp_path


def opened(path, packing, fraction=0.0, label=""):
    paths = path if isinstance(path, list) else [path]
    sources = [TokensSource(path=str(each), label=label) for each in paths]
    table = {"seq_len": 16, "global_batch": 4, "packing": packing, "sources": sources}
    table = Data.model_validate(table | {"validation_fraction": fraction})
    return open_data(table, ByteTokenizer(), seed=3)


@pytest.mark.parametrize("packing", PACKINGS)
def test_rows_are_those_of_each_folder_once_an_epoch(folders, packing):
    joined = opened(folders / "part-*", packing).train
    alone = [opened(folders / f"part-{number}", packing).train for number in range(3)]
    assert joined.rows_per_epoch == sum(each.rows_per_epoch for each in alone)
    expected = [row for each in alone for row in rows_of([each.batch(0, each.rows_per_epoch)])]
    count = joined.rows_per_epoch
    found = rows_of([joined.batch(first, 1) for first in range(count)])
    assert sorted(found) == sorted(expected)
    if packing != "ragged":
        assert rows_of([joined.batch(0, count)]) == found
    assert joined.separate_labels == ()


def test_each_folder_holds_out_its_tail_and_the_fingerprint_follows_all(folders):
    joined = opened(folders / "part-*", "concat", fraction=0.3)
    alone = [opened(folders / f"part-{n}", "concat", fraction=0.3) for n in range(3)]
    held_out = [each.validation.rows_per_epoch for each in alone if each.validation]
    assert joined.validation.rows_per_epoch == sum(held_out)
    (fingerprint,) = joined.fingerprint.values()
    each = [next(iter(x.fingerprint.values())) for x in alone]
    assert fingerprint["tokens"] == sum(x["tokens"] for x in each)
    assert fingerprint["xxh3"].split() == [x["xxh3"] for x in each]
    assert len(joined.notes) == 3


def test_a_glob_without_folders_of_tokens_is_refused(folders):
    with pytest.raises(DataError, match=r"part-x\*: no folder of tokens"):
        opened(folders / "part-x*", "concat")
