"""A number that a dtype cannot hold is refused, not written as infinity."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.conversion.models import hf_folder, tensors_of
from tests.conversion.run import convert, refused
from tests.formats.hf_folders import config_of, empty_model
from trainer.engine.checkpoint.tensors import InMemoryTensor, read_blocks
from trainer.engine.conversion.export import export_huggingface
from trainer.engine.core.errors import CheckpointError
from trainer.engine.tokenizers.byte_tokenizer import ByteTokenizer

THEIRS, OURS = "model.layers.1.mlp.up_proj.weight", "layers.1.mlp.up.weight"
SAYS = "does not fit float16: its largest number is 123456, and float16 ends at 65504"
HINT = "write bf16 or fp32"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights of which one has a large number, as `hf`, `dcp` and `torch/model.pt`."""
    root = tmp_path_factory.mktemp("large")
    file = hf_folder(root / "hf") / "model.safetensors"
    tensors = load_file(file)
    tensors[THEIRS][0, :2] = torch.tensor([1e5, -123456.0])
    save_file(tensors, file, {"format": "pt"})
    assert convert("hf2dcp", root / "hf", root / "dcp") == 0
    (root / "torch").mkdir()
    shutil.copy(root / "hf" / "config.json", root / "torch")
    assert convert("dcp2torch", root / "dcp", root / "torch" / "model.pt") == 0
    return root


@pytest.mark.parametrize(
    ("way", "source", "name"),
    [
        ("hf2hf", "hf", THEIRS),
        ("hf2dcp", "hf", f"model.{OURS}"),
        ("dcp2hf", "dcp", THEIRS),
        ("dcp2torch", "dcp", OURS),
        ("torch2dcp", "torch/model.pt", f"model.{OURS}"),
    ],
)
def test_no_conversion_makes_infinities(
    folders: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    way: str,
    source: str,
    name: str,
) -> None:
    said = refused(capsys, 5, way, folders / source, tmp_path / "out", "--dtype", "fp16")
    assert f"{name} {SAYS}" in said
    assert HINT in said
    assert convert(way, folders / source, tmp_path / "out", "--dtype", "bf16") == 0


def test_an_export_makes_no_infinities(tmp_path: Path) -> None:
    config = config_of(vocab_size=320)
    shapes = {name: weight.shape for name, weight in empty_model(config).named_parameters()}
    weights = {name: torch.randn(shape) for name, shape in shapes.items()}
    weights[OURS][0, 0] = -123456.0
    arguments = tmp_path / "out", weights, config, ByteTokenizer()
    with pytest.raises(CheckpointError, match=f"{THEIRS} {SAYS}"):
        export_huggingface(*arguments, dtype=torch.float16)
    assert not list(tmp_path.iterdir())
    export_huggingface(*arguments, dtype=torch.bfloat16)


def test_infinities_that_are_there_stay(folders: Path, tmp_path: Path) -> None:
    file = shutil.copytree(folders / "hf", tmp_path / "hf") / "model.safetensors"
    tensors = load_file(file)
    tensors[THEIRS][0, :2] = torch.tensor([torch.inf, torch.nan])
    save_file(tensors, file, {"format": "pt"})
    assert convert("hf2hf", tmp_path / "hf", tmp_path / "out", "--dtype", "fp16", "--verify") == 0
    found = tensors_of(tmp_path / "out")[THEIRS]
    assert found[0, 0] == torch.inf
    assert found[0, 1].isnan()


@pytest.mark.parametrize(
    ("source", "target", "number"),
    [
        (torch.float64, torch.float32, 1e39),
        (torch.float32, torch.bfloat16, 3.4e38),
        (torch.bfloat16, torch.float16, 65536.0),
        (torch.float32, torch.float16, 65520.0),
    ],
)
def test_a_number_beyond_is_refused_and_one_within_is_written(
    source: torch.dtype, target: torch.dtype, number: float
) -> None:
    def written(value: float) -> Callable[[], list[torch.Tensor]]:
        tensor = InMemoryTensor(torch.tensor([0.0, value], dtype=source))
        return lambda: list(read_blocks(tensor, target, 0, 2, "weight"))

    with pytest.raises(CheckpointError, match="weight does not fit"):
        written(number)()
    (block,) = written(-number / 4)()
    assert block[1] == torch.tensor(-number / 4, dtype=target)
