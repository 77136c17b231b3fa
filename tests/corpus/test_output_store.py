"""Outputs on disk: whole, continued after an interruption, or refused."""

import numpy as np
import pytest

from trainer.engine.core.errors import DataError
from trainer.engine.corpus.checksums import ALONE
from trainer.engine.corpus.output_store import OutputStore, OutputWriter

ORIGIN = {"data.seq_len": 4}


def rows(start, stop):
    """Rows of 64 KiB: a file of whole pages holds any number of them."""
    numbers = np.arange(start, stop)[:, None, None] + np.arange(2**14).reshape(64, 256)
    return {"tokens": numbers, "log_probs": (numbers / 7).astype(np.float32)}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr("trainer.engine.corpus.output_store.FILE_BYTES", 2**18)
    writer = OutputWriter(tmp_path / "train", ORIGIN, 10)
    writer.write(rows(0, 3))
    writer.write(rows(3, 6))  # as if killed here, with one file complete
    writer = OutputWriter(tmp_path / "train", ORIGIN, 10)
    assert writer.num_done == 4
    writer.write(rows(4, 7))
    assert not (tmp_path / "train").exists()
    writer.write(rows(7, 10))
    writer.finish()
    return tmp_path / "train"


def test_files_of_an_interrupted_writer_are_whole(folder):
    store = OutputStore.open_folder(folder, folder, ALONE)
    found = store.read(np.array([9, 0, 4]))
    wanted = rows(0, 10)
    assert len(list(folder.glob("tokens-*"))) == 3
    assert {name: array.dtype for name, array in found.items()} == {
        "tokens": np.int32,
        "log_probs": np.float32,
    }
    for name, array in found.items():
        assert np.array_equal(array, wanted[name][[9, 0, 4]])


def test_unfinished_work_of_another_origin_is_not_continued(tmp_path, monkeypatch):
    monkeypatch.setattr("trainer.engine.corpus.output_store.FILE_BYTES", 2**18)
    OutputWriter(tmp_path / "train", ORIGIN, 10).write(rows(0, 5))
    assert OutputWriter(tmp_path / "train", ORIGIN, 10).num_done == 4
    assert OutputWriter(tmp_path / "train", {"data.seq_len": 8}, 10).num_done == 0


@pytest.mark.parametrize("damage", ["flip", "cut", "delete", "index"])
def test_damaged_files_are_refused_with_what_to_do(folder, damage):
    file = sorted(folder.glob("log_probs*"))[-1]
    content = bytearray(file.read_bytes())
    if damage == "flip":
        content[77] ^= 1
        file.write_bytes(content)
    elif damage == "cut":
        file.write_bytes(content[:-1])
    elif damage == "delete":
        file.unlink()
    else:
        index = folder / "outputs.json"
        index.write_text(index.read_text().replace('"num_samples": 10', '"num_samples": 9'))
    with pytest.raises(DataError) as error:
        OutputStore.open_folder(folder, folder, ALONE)
    assert "trainer precompute" in error.value.render()
