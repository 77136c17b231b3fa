"""Tensors of every dtype are saved and come back bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from trainer.engine.checkpoint.chunks import CODES
from trainer.engine.checkpoint.find import find_checkpoint
from trainer.engine.checkpoint.manifest import SaveInfo
from trainer.engine.checkpoint.reader import load_state
from trainer.engine.core.errors import CheckpointError

from .states import open_store


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_every_dtype_comes_back_bit_for_bit(tmp_path: Path, mode: str) -> None:
    bits = torch.arange(256, dtype=torch.uint8).repeat(8)
    state = {}
    for dtype in CODES:
        values = bits % 2 if dtype == torch.bool else bits
        state[f"model.{dtype}"] = values.view(dtype).view(4, -1)
        state[f"model.scalar.{dtype}"] = values.view(dtype)[7].clone()
        state[f"model.columns.{dtype}"] = values.view(dtype).view(4, -1).mT
        state[f"model.empty.{dtype}"] = torch.empty(0, 3, dtype=dtype)
    store = open_store(tmp_path, mode)
    store.save(state, SaveInfo(step=1))
    store.finish()
    found = find_checkpoint(tmp_path)
    loaded = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    load_state(found.path, found.manifest, loaded, None)
    for name, tensor in state.items():
        read, expected = (each.contiguous().reshape(-1) for each in (loaded[name], tensor))
        assert torch.equal(read.view(torch.uint8), expected.view(torch.uint8)), name


def test_a_dtype_that_safetensors_lacks_is_named(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    state = {"model.weight": torch.zeros(2, dtype=torch.complex128)}
    with pytest.raises(CheckpointError, match=r"model\.weight is torch\.complex128"):
        store.save(state, SaveInfo(step=1))
    assert list(tmp_path.iterdir()) == []
