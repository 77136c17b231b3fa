"""Whatever happens to the newest checkpoint's files, it is noticed and the one before is taken."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from trainer.engine.checkpoint.find import find_checkpoint
from trainer.engine.checkpoint.manifest import verify
from trainer.engine.core.errors import CheckpointError, ExitCode

from .states import differing, open_store, save_steps

NEWEST, SHARD = "step-00000003", "shard-00000.safetensors"


def test_any_flipped_bit_is_detected(tmp_path: Path) -> None:
    store = save_steps(tmp_path, 1, 2, 3)
    files = sorted((tmp_path / NEWEST).iterdir())
    assert {path.name for path in files} == {
        "shard-00000.safetensors",
        "index.json",
        "manifest.json",
    }
    dice = random.Random(0)
    for trial in range(200):
        file = files[trial % len(files)]
        whole = file.read_bytes()
        damaged = bytearray(whole)
        position = dice.randrange(len(damaged))
        damaged[position] ^= 1 << dice.randrange(8)
        file.write_bytes(damaged)
        found = store.latest()
        assert found is not None
        assert found.path.name == "step-00000002", f"{file.name}: bit in byte {position} unseen"
        file.write_bytes(whole)
    assert differing(find_checkpoint(tmp_path), 3) == []


def truncate(folder: Path) -> None:
    file = folder / "shard-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def remove_data(folder: Path) -> None:
    (folder / "shard-00000.safetensors").unlink()


def remove_metadata(folder: Path) -> None:
    (folder / "index.json").unlink()


def remove_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()


def empty_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_bytes(b"")


def zero_a_page(folder: Path) -> None:
    file = folder / "shard-00000.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-200] + bytes(200))


def add_a_shard_of_another_save(folder: Path) -> None:
    shutil.copy(folder / "shard-00000.safetensors", folder / "shard-00001.safetensors")


def take_the_manifest_of_another_step(folder: Path) -> None:
    shutil.copy(folder.with_name("step-00000002") / "manifest.json", folder / "manifest.json")


def take_all_files_of_another_step(folder: Path) -> None:
    shutil.rmtree(folder)
    shutil.copytree(folder.with_name("step-00000002"), folder)


def take_the_data_of_another_step(folder: Path) -> None:
    shutil.copy(
        folder.with_name("step-00000002") / "shard-00000.safetensors",
        folder / "shard-00000.safetensors",
    )


def link_a_file(folder: Path) -> None:
    file = folder / "shard-00000.safetensors"
    file.rename(folder.parent / "elsewhere")
    file.symlink_to(folder.parent / "elsewhere")


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (truncate, "shard-00000.safetensors has"),
        (remove_data, "shard-00000.safetensors is missing"),
        (remove_metadata, "index.json is missing"),
        (remove_manifest, "not a complete checkpoint"),
        (empty_manifest, "checksum differs"),
        (zero_a_page, "shard-00000.safetensors does not hold what was saved"),
        (add_a_shard_of_another_save, "shard-00001.safetensors is not in the manifest"),
        (take_the_manifest_of_another_step, "manifest.json is of step 2"),
        (take_all_files_of_another_step, "manifest.json is of step 2"),
        (take_the_data_of_another_step, "shard-00000.safetensors does not hold what was saved"),
        (link_a_file, "shard-00000.safetensors is not a regular file"),
    ],
)
def test_damage_is_named_and_the_one_before_is_taken(
    tmp_path: Path, damage: Callable[[Path], None], reason: str
) -> None:
    store = save_steps(tmp_path, 1, 2, 3)
    damage(tmp_path / NEWEST)
    found = store.latest()
    assert found is not None
    assert found.path.name == "step-00000002"
    assert differing(found, 2) == []
    assert len(found.skipped) == 1
    assert found.skipped[0].startswith(NEWEST)
    assert reason in found.skipped[0]
    assert (tmp_path / NEWEST).exists(), "what is broken is left for its owner to look at"


def test_a_note_beside_the_files_is_no_damage(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    (tmp_path / "step-00000001" / "README.txt").write_text("the good one")
    assert verify(tmp_path / "step-00000001") == []


def test_two_bad_ones_lead_to_the_third(tmp_path: Path) -> None:
    store = save_steps(tmp_path, 1, 2, 3)
    truncate(tmp_path / "step-00000003")
    remove_manifest(tmp_path / "step-00000002")
    found = store.latest()
    assert found is not None
    assert found.path.name == "step-00000001"
    assert [reason[:13] for reason in found.skipped] == ["step-00000003", "step-00000002"]


def test_none_intact_is_an_error_with_every_reason(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2)
    truncate(tmp_path / "step-00000001")
    zero_a_page(tmp_path / "step-00000002")
    with pytest.raises(CheckpointError) as raised:
        open_store(tmp_path).latest()
    assert raised.value.exit_code == ExitCode.CHECKPOINT
    assert "step-00000001: shard-00000.safetensors has" in raised.value.message
    assert "step-00000002: shard-00000.safetensors does not hold" in raised.value.message
