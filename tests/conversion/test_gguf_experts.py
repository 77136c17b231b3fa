"""GGUF files of models with experts against the packages gguf and transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from tests.conversion.models import hf_folder, loaded_by_transformers, tensors_of
from tests.conversion.run import convert
from tests.formats.hf_folders import config_of
from trainer.engine.conversion.convert import TARGET_DTYPES
from trainer.engine.formats.gguf_names import write_sizes

DTYPES = {"fp32": "F32", "fp16": "F16", "bf16": "BF16", "q8_0": "Q8_0"}
Q8_0 = gguf.GGMLQuantizationType.Q8_0
EXPERTS = {"num_experts": 4, "experts_per_token": 2, "expert_ffn_dim": 64}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3moe": {"name": "qwen3", "head_dim": 32, "moe": EXPERTS},
    "llama": {"name": "mixtral", "moe": EXPERTS},
}
ARCHITECTURES = {"qwen3moe": gguf.MODEL_ARCH.QWEN3MOE, "llama": gguf.MODEL_ARCH.LLAMA}
MIXTRAL = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}


def rounded(weight: Tensor, dtype: str) -> Tensor:
    """Return a weight as the package rounds it."""
    if dtype != "q8_0":
        return weight.to(TARGET_DTYPES[dtype]).float()
    packed = gguf.quantize(weight.numpy(), Q8_0)
    return torch.from_numpy(gguf.dequantize(packed, Q8_0))


@pytest.mark.parametrize(
    ("architecture", "dtype"),
    [
        pytest.param(name, dtype, marks=[] if quick else [pytest.mark.matrix])
        for name in FAMILIES
        for dtype in DTYPES
        for quick in [(name, dtype) == ("qwen3moe", "q8_0")]
    ],
)
def test_experts_go_to_gguf_and_back(
    architecture: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.engine.checkpoint.tensors.BLOCK_BYTES", 5000)
    config = config_of(**{"dim": 64, **FAMILIES[architecture]})
    folder, file = hf_folder(tmp_path / "hf", config), tmp_path / "model.gguf"
    assert convert("hf2dcp", folder, tmp_path / "dcp") == 0
    assert convert("dcp2gguf", tmp_path / "dcp", file, "--dtype", dtype, "--verify") == 0
    assert convert("gguf2dcp", file, tmp_path / "again", "--verify") == 0
    assert convert("dcp2hf", tmp_path / "again", tmp_path / "back", "--dtype", "fp32") == 0
    reader = gguf.GGUFReader(file)
    there = {tensor.name: tensor for tensor in reader.tensors}
    found, given = tensors_of(tmp_path / "back"), tensors_of(folder)
    assert found.keys() == given.keys()
    names = gguf.get_tensor_name_map(ARCHITECTURES[architecture], config.n_layers)
    for block in range(config.n_layers):
        inside = next(name for name in given if f"layers.{block}." in name and ".experts." in name)
        path = inside.partition(".experts.")[0]
        router = there[f"{names.get_name(f'{path}.gate')}.weight"]
        assert router.tensor_type.name == "F32"
        assert torch.equal(torch.from_numpy(router.data.copy()), given[f"{path}.gate.weight"])
        for word in MIXTRAL:
            # The package knows llama.cpp's name of a stack by that of transformers' tensor.
            stack = there[f"{names.get_name(f'model.layers.{block}.mlp.experts.{word}')}.weight"]
            own = MIXTRAL[word] if architecture == "llama" else word
            parts = [f"{path}.experts.{number}.{own}.weight" for number in range(4)]
            weight = rounded(torch.stack([given[part] for part in parts]), dtype)
            assert stack.tensor_type.name == DTYPES[dtype]
            values = torch.from_numpy(gguf.dequantize(stack.data, stack.tensor_type).copy())
            assert torch.equal(values.view(weight.shape), weight), stack.name
            assert torch.equal(torch.stack([found[part] for part in parts]), weight)
    keys = {key: field for key, field in reader.fields.items() if ".expert" in key}
    said = {key.partition(".")[2]: int(each.parts[each.data[0]][0]) for key, each in keys.items()}
    assert said == {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 64}


@pytest.mark.matrix
def test_transformers_computes_the_same_of_a_file(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "hf", config_of(**{"dim": 64, **FAMILIES["qwen3moe"]}))
    assert convert("hf2dcp", folder, tmp_path / "dcp") == 0
    assert convert("dcp2gguf", tmp_path / "dcp", tmp_path / "model.gguf", "--dtype", "fp32") == 0
    # transformers (5.23) does not read the width of an expert.
    settings = AutoConfig.from_pretrained(folder)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", config=settings)
    x = torch.randint(256, (2, 40), generator=torch.Generator().manual_seed(1))
    expected = loaded_by_transformers(folder)(x).logits
    torch.testing.assert_close(theirs.eval()(x).logits, expected)


def test_experts_that_llama_cpp_computes_otherwise_are_not_written() -> None:
    changes: list[tuple[str, bool]] = [("normalize", False), ("balance_bias", True)]
    for key, value in changes:
        config = config_of(name="qwen3", moe={**EXPERTS, key: value})
        with pytest.raises(ValueError, match=rf"moe\.{key} must be"):
            write_sizes(config)
    with pytest.raises(ValueError, match="are written"):
        write_sizes(config_of(name="deepseek_v3"))
