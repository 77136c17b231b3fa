"""Experts: matrices of their own in Hugging Face's folders, or one tensor of all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.conversion.models import hf_folder, same_bits, tensors_of
from tests.conversion.run import convert, refused
from tests.distributed import run_ranks
from tests.formats.hf_folders import config_of, empty_model
from trainer.engine.checkpoint.tensors import InMemoryTensor
from trainer.engine.formats.hf_folder import CONFIG, SINGLE
from trainer.engine.formats.hf_layout import extract_part
from trainer.engine.formats.hf_load import load_huggingface
from trainer.engine.parallel.materialize import materialize, without_storage
from trainer.kernels.choose import choose

MODEL: dict[str, Any] = {"name": "qwen3", "moe": {"num_experts": 5, "expert_ffn_dim": 24}}
EXPERTS = "model.layers.{i}.mlp.experts"


def fused(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors that transformers has in memory, put together by hand."""
    found = {name: each for name, each in tensors.items() if ".experts." not in name}
    for i in range(2):
        path = EXPERTS.format(i=i)
        gate, up, down = (
            torch.stack([tensors[f"{path}.{j}.{word}_proj.weight"] for j in range(5)])
            for word in ("gate", "up", "down")
        )
        found[f"{path}.gate_up_proj"] = torch.cat([gate, up], 1)
        found[f"{path}.down_proj"] = down.contiguous()
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hf_folder(tmp_path_factory.mktemp("experts") / "hf", config_of(**MODEL), tokenizer=False)


def test_a_folder_with_all_experts_in_one_tensor_is_read(folder: Path, tmp_path: Path) -> None:
    together = fused(tensors_of(folder))
    (tmp_path / "fused").mkdir()
    save_file(together, tmp_path / "fused" / SINGLE)
    (tmp_path / "fused" / CONFIG).write_bytes((folder / CONFIG).read_bytes())
    model = empty_model(config_of(**MODEL))
    assert load_huggingface(tmp_path / "fused", model, config_of(**MODEL)) == []
    for name, parameter in model.named_parameters():
        theirs = together[model.config.layout.to_hf(name)]
        assert torch.equal(parameter, theirs.view_as(parameter)), name
    assert convert("hf2hf", tmp_path / "fused", tmp_path / "apart", "--verify") == 0
    assert same_bits(tensors_of(tmp_path / "apart"), tensors_of(folder))


def load_sharded(source: str, dim: int) -> dict[str, Any]:
    """Return weights of a model that ranks share, cut along a dim, whole."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    config = config_of(**MODEL)
    mesh = init_device_mesh("cpu", (3,))
    with without_storage():
        model = config.build(choose({}, "cpu", 64))
    for module in model.modules():
        for key, weight in list(module.named_parameters(recurse=False)):
            if weight.dim() > 2:
                placed = distribute_tensor(weight.data, mesh, [Shard(dim)], src_data_rank=None)
                setattr(module, key, torch.nn.Parameter(placed))
    materialize(model, torch.device("cpu"), seed=0, fill=False)
    load_huggingface(Path(source), model, config)
    return {
        name: weight.full_tensor().detach().numpy()
        for name, weight in model.named_parameters()
        if weight.dim() > 2
    }


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_ranks_read_their_parts(folder: Path, dim: int) -> None:
    """Five experts on three ranks; or rows of all of them."""
    expected, layout = fused(tensors_of(folder)), config_of(**MODEL).layout
    for found in run_ranks(3, load_sharded, str(folder), dim):
        assert len(found) == 4
        for name, weight in found.items():
            theirs = expected[layout.to_hf(name) or ""]
            assert torch.equal(torch.from_numpy(weight), theirs.view(weight.shape)), name


def test_what_is_wrong_with_experts_is_said(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "hf").mkdir()
    tensors, path = tensors_of(folder), EXPERTS.format(i=1)
    del tensors[f"{path}.3.up_proj.weight"]
    tensors[f"{path}.2.down_proj.weight"] = torch.zeros(32, 25)
    tensors[f"{path}.5.gate_proj.weight"] = torch.zeros(24, 32)
    tensors[f"{path}.0.down_proj.weight"] = tensors[f"{path}.0.down_proj.weight"].half()
    save_file(tensors, tmp_path / "hf" / SINGLE)
    (tmp_path / "hf" / CONFIG).write_bytes((folder / CONFIG).read_bytes())
    said = refused(capsys, 5, "hf2dcp", tmp_path / "hf", tmp_path / "dcp")
    ours = "layers.1.mlp.experts"
    assert f"{path}.3.up_proj.weight ({ours}.gate_up[3, 1] here) is not in the folder" in said
    assert f"{path}.2.down_proj.weight is [32, 25] there and [32, 24] here" in said
    assert f"{path}.5.gate_proj.weight is in the folder but not in the model" in said
    assert f"{ours}.down is stored in several dtypes: F16, F32" in said


def test_an_impossible_number_of_experts_is_refused_at_once(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / SINGLE).write_bytes((folder / SINGLE).read_bytes())
    settings = json.loads((folder / CONFIG).read_text())
    settings["num_local_experts"] = 2**31
    (tmp_path / "hf" / CONFIG).write_text(json.dumps(settings))
    said = refused(capsys, 5, "hf2dcp", tmp_path / "hf", tmp_path / "dcp")
    assert "moe.num_experts = 2147483648, but there are" in said


def test_a_part_reads_the_rows_of_one_matrix() -> None:
    stack = torch.randn(4, 2, 3, 5)
    layout = config_of(**MODEL).layout
    parts = layout.hf_parts("layers.7.mlp.experts.gate_up", stack.shape)
    assert [part.name for part in parts[2:4]] == [
        "model.layers.7.mlp.experts.1.gate_proj.weight",
        "model.layers.7.mlp.experts.1.up_proj.weight",
    ]
    for number, part in enumerate(parts):
        rows = extract_part(InMemoryTensor(stack), part)
        assert rows.shape == (3, 5)
        expected = stack[number // 2, number % 2]
        assert torch.equal(rows.read(1, 3), expected[1:])
