"""CRC-32s of the archives of torch.save: what is written is right, what is read is compared."""

from __future__ import annotations

import shutil
import zipfile
from pathlib import Path

import pytest
import torch

from tests.conversion.models import hf_folder, tensors_of
from tests.conversion.run import convert, refused
from tests.formats.hf_folders import config_of
from trainer.engine.checkpoint.torch_file import check_records


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `hf`, and `dcp` and `model.pt` that were made of it."""
    root = tmp_path_factory.mktemp("archives")
    hf_folder(root / "hf", config_of(tie_embeddings=True))
    assert convert("hf2dcp", root / "hf", root / "dcp") == 0
    assert convert("dcp2torch", root / "dcp", root / "model.pt") == 0
    return root


def test_an_archive_passes_the_test_of_zip(folders: Path) -> None:
    with zipfile.ZipFile(folders / "model.pt") as archive:
        assert archive.testzip() is None
        data = [entry for entry in archive.infolist() if "/data/" in entry.filename]
        assert len(data) == len(tensors_of(folders / "hf"))
        assert all(entry.CRC for entry in data)
    loaded = torch.load(folders / "model.pt", weights_only=True)
    layout = config_of().layout
    for name, tensor in tensors_of(folders / "hf").items():
        assert torch.equal(loaded[layout.from_hf(name)], tensor)


def test_damage_in_the_data_of_an_archive_is_found(
    folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged = tmp_path / "model.pt"
    content = bytearray((folders / "model.pt").read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    shutil.copy(folders / "hf" / "config.json", tmp_path)
    said = refused(capsys, 5, "torch2dcp", damaged, tmp_path / "dcp")
    assert f"{damaged} is damaged: Bad CRC-32 for file 'archive/data/" in said


def test_an_archive_without_sums_is_read(folders: Path, tmp_path: Path) -> None:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(torch.load(folders / "model.pt"), tmp_path / "model.pt")
    finally:
        torch.serialization.set_crc32_options(before)
    shutil.copy(folders / "hf" / "config.json", tmp_path)
    assert check_records(tmp_path / "model.pt") == ""
    assert convert("torch2dcp", tmp_path / "model.pt", tmp_path / "dcp") == 0
