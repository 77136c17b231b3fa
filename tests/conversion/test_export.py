"""What a run exports is what transformers reads, from any number of ranks."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.cases import also
from tests.conversion.models import CASES, VARIANTS, loaded_by_transformers, tensors_of
from tests.distributed import run_ranks
from tests.formats.hf_folders import config_of, empty_model
from tests.model_zoo.peers import in_their_words
from trainer.engine.conversion.export import export_huggingface
from trainer.engine.core.errors import CheckpointError, RecipeError
from trainer.engine.tokenizers.byte_tokenizer import ByteTokenizer


def random_model(**changes: Any) -> Any:
    config = config_of(**changes)
    model = empty_model(config)
    generator = torch.Generator().manual_seed(5)
    for name, parameter in model.named_parameters():
        is_norm = name.endswith("norm.weight")
        middle = model.initial_values(name).value if is_norm else 0.0
        nn.init.normal_(parameter, middle, 0.2, generator=generator)
    for buffer in model.saved_buffers().values():
        nn.init.normal_(buffer, 0.0, 0.2, generator=generator)
    return model, config


@pytest.mark.parametrize("shard_bytes", [10**9, 20_000])
@pytest.mark.parametrize("variant", CASES)
def test_transformers_gives_our_logits(tmp_path: Path, variant: str, shard_bytes: int) -> None:
    model, config = random_model(**VARIANTS[variant])
    target = tmp_path / "hf"
    saved = model.saved_buffers()
    named = {name: buffer for name, buffer in saved.items() if config.layout.to_hf(name)}
    weights = dict(model.named_parameters()) | named
    export_huggingface(target, weights, config, ByteTokenizer(), shard_bytes=shard_bytes)
    assert (target / "model.safetensors.index.json").exists() == (shard_bytes < 10**9)
    theirs = loaded_by_transformers(target)
    assert theirs.dtype is torch.float32
    tokens = torch.randint(config.vocab, (2, 100), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), theirs(tokens).logits, atol=1e-5, rtol=1e-5)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_files_are_not_larger_than_asked_for(tmp_path: Path) -> None:
    model, config = random_model()
    weights = dict(model.named_parameters())
    export_huggingface(tmp_path / "hf", weights, config, ByteTokenizer(), shard_bytes=50_000)
    sizes = [file.stat().st_size for file in (tmp_path / "hf").glob("*.safetensors")]
    assert len(sizes) > 1
    assert max(sizes) < 50_000 + 4096  # and the header
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 4 * sum(w.numel() for w in weights.values())


def test_auto_tokenizer_reads_the_byte_tokenizer(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    model, config = random_model()
    weights = dict(model.named_parameters())
    export_huggingface(tmp_path / "hf", weights, config, ByteTokenizer())
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    text = "Grüße, 世界!\n\tif x: \x00 pass"
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    assert tokenizer.eos_token_id == 256
    build_config_json = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert build_config_json["eos_token_id"] == 256


def test_a_dtype_can_be_asked_for(tmp_path: Path) -> None:
    model, config = random_model()
    weights = dict(model.named_parameters())
    target = tmp_path / "hf"
    export_huggingface(target, weights, config, ByteTokenizer(), dtype=torch.bfloat16)
    assert loaded_by_transformers(target).dtype is torch.bfloat16
    for name, tensor in tensors_of(target).items():
        ours = weights[config.layout.from_hf(name) or ""]
        assert torch.equal(tensor, ours.bfloat16()), name


def test_an_existing_folder_is_not_replaced(tmp_path: Path) -> None:
    model, config = random_model()
    with pytest.raises(RecipeError, match="exists: not replaced"):
        export_huggingface(tmp_path, dict(model.named_parameters()), config, ByteTokenizer())
    assert list(tmp_path.iterdir()) == []


def test_a_failure_leaves_nothing(tmp_path: Path) -> None:
    model, config = random_model()

    class Broken(ByteTokenizer):
        def save(self, folder: Path) -> None:
            raise OSError("the disk is gone")

    with pytest.raises(CheckpointError, match="the disk is gone"):
        export_huggingface(tmp_path / "hf", dict(model.named_parameters()), config, Broken())
    assert list(tmp_path.iterdir()) == []


def test_a_weight_without_a_name_there_is_reported(tmp_path: Path) -> None:
    model, config = random_model()
    weights = {**dict(model.named_parameters()), "layers.0.extra": torch.zeros(1)}
    with pytest.raises(CheckpointError, match=r"layers\.0\.extra: model .* has no Hugging Face"):
        export_huggingface(tmp_path / "hf", weights, config, ByteTokenizer())


def export_sharded(folder: str, way: str, family: str) -> dict[str, Any]:
    """Cut a model's weights in some way, export it, and return the whole weights."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    size = dist.get_world_size()
    # Rows that no number of ranks divides.
    model, config = random_model(name=family, vocab_size=321)
    shape = (2, size // 2) if way == "hybrid" else (size,)
    mesh = init_device_mesh("cpu", shape)
    placements = {
        "rows": [Shard(0)],
        "columns": [Shard(1)],
        "replicated": [Replicate()],
        "hybrid": [Replicate(), Shard(0)],
    }
    weights: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        if way == "plain" or (way == "columns" and parameter.dim() == 1):
            weights[name] = parameter
        else:
            weights[name] = distribute_tensor(parameter.data, mesh, placements[way])
    export_huggingface(
        Path(folder), weights, config, ByteTokenizer(), shard_bytes=30_000, group=dist.new_group()
    )
    theirs = in_their_words(config, {name: p.detach() for name, p in model.named_parameters()})
    return {name: value.numpy() for name, value in theirs.items()}


@pytest.mark.parametrize(
    ("world", "way", "family"),
    [
        *((2, way, "llama3") for way in ("rows", "columns", "plain", "replicated")),
        *((4, way, "llama3") for way in ("rows", "hybrid")),
        *also((4, "rows", "phi3"), (2, "columns", "phi3")),
    ],
)
def test_ranks_write_one_folder_together(tmp_path: Path, world: int, way: str, family: str) -> None:
    target = tmp_path / "hf"
    [expected, *_] = run_ranks(world, export_sharded, str(target), way, family)
    found = tensors_of(target)
    assert len(found) == len(expected)
    for name, values in expected.items():
        assert np.array_equal(found[name].numpy(), values), name
    assert loaded_by_transformers(target).config.vocab_size == 321
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def export_from_a_rank_that_fails(folder: str) -> str:
    import torch.distributed as dist

    from trainer.engine.conversion import export

    model, config = random_model()
    if dist.get_rank() == 1:

        def broken(todo: Any) -> None:
            raise OSError(28, os.strerror(28))

        export._write = broken
    try:
        export_huggingface(
            Path(folder),
            dict(model.named_parameters()),
            config,
            ByteTokenizer(),
            group=dist.new_group(),
        )
    except CheckpointError as error:
        return error.message
    return ""


def test_all_ranks_learn_of_a_failure_on_one(tmp_path: Path) -> None:
    for message in run_ranks(2, export_from_a_rank_that_fails, str(tmp_path / "hf")):
        assert "No space left on device" in message
    assert list(tmp_path.iterdir()) == []
