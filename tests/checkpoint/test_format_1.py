"""Checkpoints of format 1, torch DCP files, are read; those made to do harm are refused."""

from __future__ import annotations

import io
import os
import pickle
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from tests.limits import limited
from trainer.engine.checkpoint.find import find_checkpoint
from trainer.engine.checkpoint.guarded import read_contents
from trainer.engine.checkpoint.manifest import FileEntry, Manifest, TensorEntry, read_manifest
from trainer.engine.checkpoint.reader import load_state, read_tensors
from trainer.engine.core.errors import CheckpointError

from .states import blank, differing, rewrite_as_format_1, save_steps, seal, state_of

NAME = "model.short"


class Payload:
    """Creates a file when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.canary),)


def save_as_format_1(folder: Path, *steps: int) -> None:
    save_steps(folder, *steps)
    for step in steps:
        rewrite_as_format_1(folder / f"step-{step:08d}")


def rewrite_metadata(folder: Path, change: Callable[[Metadata], Any]) -> None:
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))


def code_in_the_metadata(folder: Path, canary: Path) -> None:
    rewrite_metadata(folder, lambda m: setattr(m, "planner_data", Payload(canary)))


def code_as_the_metadata(folder: Path, canary: Path) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(Payload(canary)))


def code_by_a_dotted_name(folder: Path, canary: Path) -> None:
    # STACK_GLOBAL walks attributes: `torch.serialization` + `os.mkdir` reaches `os`.
    target = b"\x8c\x13torch.serialization\x8c\x08os.mkdir\x93"
    path = str(canary).encode()
    argument = b"X" + len(path).to_bytes(4, "little") + path
    (folder / ".metadata").write_bytes(b"\x80\x04" + target + argument + b"\x85R.")


class Attribute:
    """Pickles as Python 3.11.2 pickles a member of an enum."""

    def __init__(self, owner: Any, name: str) -> None:
        self.call = getattr, (owner, name)

    def __reduce__(self) -> Any:
        return self.call


def an_attribute_that_is_no_member(folder: Path, canary: Path) -> None:
    attribute = Attribute(TensorProperties, "create_from_tensor")
    rewrite_metadata(folder, lambda m: setattr(m, "planner_data", attribute))


def test_members_of_enums_are_read_as_any_python_pickles_them(tmp_path: Path) -> None:
    save_as_format_1(tmp_path, 1)
    folder = tmp_path / "step-00000001"
    member = Attribute(_MEM_FORMAT_ENCODING, "TORCH_CONTIGUOUS_FORMAT")
    rewrite_metadata(folder, lambda m: setattr(m, "planner_data", member))
    seal(folder)
    assert differing(find_checkpoint(folder), 1) == []


def code_in_a_bytes_item(folder: Path, canary: Path) -> None:
    stream = io.BytesIO()
    torch.save(Payload(canary), stream)
    (folder / "__9_0.distcp").write_bytes(stream.getvalue())

    def point_to_it(metadata: Metadata) -> None:
        metadata.state_dict_metadata[NAME] = BytesStorageMetadata()
        for index, info in metadata.storage_data.items():
            if index.fqn == NAME:
                info.relative_path, info.offset = "__9_0.distcp", 0
                info.length = len(stream.getvalue())

    rewrite_metadata(folder, point_to_it)


def code_in_place_of_a_tensor(folder: Path, canary: Path) -> None:
    stream = io.BytesIO()
    torch.save(Payload(canary), stream)
    replace_tensor(folder, stream.getvalue())


def a_compressed_tensor(folder: Path, canary: Path) -> None:
    stream, packed = io.BytesIO(), io.BytesIO()
    torch.save(torch.zeros(2, 5), stream)
    with zipfile.ZipFile(stream) as plain, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as to:
        for entry in plain.infolist():
            to.writestr(entry.filename, plain.read(entry))
    replace_tensor(folder, packed.getvalue())


def replace_tensor(folder: Path, content: bytes) -> None:
    (folder / "__9_0.distcp").write_bytes(content)

    def point_to_it(metadata: Metadata) -> None:
        for index, info in metadata.storage_data.items():
            if index.fqn == NAME:
                info.relative_path, info.offset = "__9_0.distcp", 0
                info.length = len(content)

    rewrite_metadata(folder, point_to_it)


def attributes_of_a_class(folder: Path, canary: Path) -> None:
    # BUILD with a pair would set them, for all the process.
    word = b"\x8c\x25torch.distributed.checkpoint.metadata\x8c\x08Metadata\x93"
    (folder / ".metadata").write_bytes(b"\x80\x04" + word + b"N}\x8c\x03\x61bcNs\x86b.")


def point_to(path: str) -> Callable[[Path, Path], None]:
    def change(metadata: Metadata) -> None:
        for info in metadata.storage_data.values():
            info.relative_path = path

    return lambda folder, canary: rewrite_metadata(folder, change)


def test_a_checkpoint_that_two_ranks_saved_is_read(tmp_path: Path) -> None:
    """The folder was written by the last version that wrote this format."""
    with zipfile.ZipFile(Path(__file__).with_name("format_1.zip")) as archive:
        archive.extractall(tmp_path / "checkpoints")
    found = find_checkpoint(tmp_path)
    assert found.manifest.format == 1
    assert differing(found, 2) == []
    own = {f"rng.{rank}.torch": torch.zeros(2, dtype=torch.int64) for rank in range(2)}
    load_state(found.path, found.manifest, own, None)
    assert [tensor.tolist() for tensor in own.values()] == [[2, 0], [2, 1]]


@pytest.mark.parametrize(
    ("attack", "reason"),
    [
        (code_in_the_metadata, "asks for posix.mkdir: refused"),
        (code_as_the_metadata, "asks for posix.mkdir: refused"),
        (code_by_a_dotted_name, "asks for torch.serialization.os.mkdir: refused"),
        (an_attribute_that_is_no_member, "asks for create_from_tensor of"),
        (code_in_a_bytes_item, "lists other tensors"),
        (code_in_place_of_a_tensor, "is not read: UnpicklingError"),
        (a_compressed_tensor, "is compressed: not read"),
        (attributes_of_a_class, "changes a class: refused"),
        (point_to("../step-00000001/__0_0.distcp"), "points to '../step-00000001"),
        (point_to("/etc/hostname"), "points to '/etc/hostname'"),
    ],
)
def test_an_attack_is_refused(
    tmp_path: Path, attack: Callable[[Path, Path], None], reason: str
) -> None:
    save_as_format_1(tmp_path, 1, 2)
    canary, folder = tmp_path / "canary", tmp_path / "step-00000002"
    attack(folder, canary)
    seal(folder)
    found = find_checkpoint(folder)
    loaded = blank()
    with pytest.raises(CheckpointError, match=reason):
        load_state(found.path, found.manifest, loaded, None)
    assert not canary.exists()


def test_a_bytes_item_that_the_manifest_does_not_name_is_refused_too(tmp_path: Path) -> None:
    save_as_format_1(tmp_path, 1)
    canary, folder = tmp_path / "canary", tmp_path / "step-00000001"
    code_in_a_bytes_item(folder, canary)
    seal(folder, lambda manifest: manifest["tensors"].pop(NAME))
    found = find_checkpoint(folder)
    with pytest.raises(CheckpointError, match=f"{NAME} is not in the checkpoint"):
        load_state(found.path, found.manifest, blank(), None)
    assert not canary.exists()


def test_a_number_in_the_metadata_takes_no_memory(tmp_path: Path) -> None:
    save_as_format_1(tmp_path, 1)
    folder = tmp_path / "step-00000001"
    # LONG_BINPUT: the unpickler written in C makes a table of twice 2**24 places.
    (folder / ".metadata").write_bytes(b"\x80\x02Nr\x00\x00\x00\x01.")
    seal(folder)
    manifest = read_manifest(folder)
    tracemalloc.start()
    with pytest.raises(CheckpointError, match="holds no table of contents"):
        read_tensors(folder, manifest, blank())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10**7


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"}" * 2**19, "its pickle asks for 524288 objects"),
        (b"N\x94" * 2**18, "its pickle asks for 262144 objects"),
        (b"N" * 2**21, "has more than [0-9]+ bytes"),
    ],
)
def test_metadata_that_would_fill_the_memory_is_refused(
    tmp_path: Path, content: bytes, reason: str
) -> None:
    save_as_format_1(tmp_path, 1)
    folder = tmp_path / "step-00000001"
    (folder / ".metadata").write_bytes(b"\x80\x04" + content + b".")
    seal(folder)
    with limited(), pytest.raises(CheckpointError, match=reason):
        read_tensors(folder, read_manifest(folder), blank())


def test_metadata_of_many_shards_is_read(tmp_path: Path) -> None:
    """The limits follow from what the manifest lists."""
    parts = [ChunkStorageMetadata(torch.Size([n, 0]), torch.Size([1, 9])) for n in range(512)]
    names = [f"model.layers.{number}.feed_forward.w1.weight" for number in range(40)]
    entry = TensorStorageMetadata(TensorProperties(torch.float32), torch.Size([512, 9]), parts)
    metadata = Metadata(
        dict.fromkeys(names, entry),
        storage_data={
            MetadataIndex(name, part.offsets): _StorageInfo(f"__{n}_0.distcp", 10**9, 10**6)
            for name in names
            for n, part in enumerate(parts)
        },
    )
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    manifest = Manifest(
        step=1,
        saved_at="",
        tensors=dict.fromkeys(names, TensorEntry(shape=[512, 9], dtype="float32")),
        files=dict.fromkeys([f"__{n}_0.distcp" for n in range(512)], FileEntry(bytes=1, xxh3="")),
    )
    assert len(read_contents(tmp_path, manifest).storage_data) == 40 * 512


def test_the_attacks_are_real(tmp_path: Path) -> None:
    save_as_format_1(tmp_path, 1)
    code_in_the_metadata(tmp_path / "step-00000001", tmp_path / "canary")
    with open(tmp_path / "step-00000001" / ".metadata", "rb") as file:
        pickle.load(file)
    assert (tmp_path / "canary").exists()


def test_an_honest_checkpoint_passes_the_same_way(tmp_path: Path) -> None:
    save_as_format_1(tmp_path, 1)
    rewrite_metadata(tmp_path / "step-00000001", lambda metadata: None)
    seal(tmp_path / "step-00000001")
    found = find_checkpoint(tmp_path)
    loaded = blank()
    load_state(found.path, found.manifest, loaded, None)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in state_of(1).items())
