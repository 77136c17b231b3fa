"""Folders as they lie on the hub: packed numbers, and models that see images too."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.conversion.models import hf_folder, loaded_by_transformers, same_bits, tensors_of
from tests.conversion.run import convert, refused
from tests.formats.hf_folders import config_of
from trainer.engine.formats.hf_folder import CONFIG, SINGLE
from trainer.engine.inference.inputs import Dtype
from trainer.engine.inference.open import open_model

GPT_OSS: dict[str, Any] = {
    "name": "gpt_oss",
    "dim": 64,
    "moe": {"num_experts": 3, "expert_ffn_dim": 32},
}


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    """A folder whose experts are in MXFP4, and `plain` beside it, as transformers unpacks it."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    plain = hf_folder(
        tmp_path / "plain", config_of(**GPT_OSS), dtype=torch.bfloat16, tokenizer=False
    )
    tensors, unpacked = tensors_of(plain), {}
    generator = torch.Generator().manual_seed(0)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, rows, columns = tensors.pop(name).shape
        packing = (experts, columns, rows // 32)
        blocks = torch.randint(256, (*packing, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(120, 126, packing, dtype=torch.uint8, generator=generator)
        unpacked[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    settings = json.loads((plain / CONFIG).read_text())
    settings["quantization_config"] = {"quant_method": "mxfp4"}
    folder = tmp_path / "packed"
    folder.mkdir()
    save_file(tensors, folder / SINGLE)
    (folder / CONFIG).write_text(json.dumps(settings))
    whole = {name: each for name, each in tensors.items() if each.dtype is not torch.uint8}
    save_file({**whole, **unpacked}, plain / SINGLE, metadata={"format": "pt"})
    return folder


def test_mxfp4_is_read_as_transformers_does(packed: Path) -> None:
    root = packed.parent
    assert convert("hf2dcp", packed, root / "dcp", "--verify") == 0
    assert convert("dcp2hf", root / "dcp", root / "back") == 0
    assert same_bits(tensors_of(root / "back"), tensors_of(root / "plain"))
    assert convert("hf2hf", packed, root / "unpacked") == 0
    assert same_bits(tensors_of(root / "unpacked"), tensors_of(root / "plain"))
    assert "quantization_config" not in json.loads((root / "unpacked" / CONFIG).read_text())
    tokens = torch.arange(50)[None]
    with torch.no_grad():
        one = loaded_by_transformers(root / "plain").float()(tokens).logits
        other = open_model(root / "dcp", dtype=Dtype.FP32).model(tokens)
    torch.testing.assert_close(other, one, atol=1e-4, rtol=1e-5)


def test_scales_that_are_missing_are_said(packed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = load_file(packed / SINGLE)
    name = "model.layers.0.mlp.experts.down_proj"
    del tensors[f"{name}_scales"]
    save_file(tensors, packed / SINGLE)
    said = refused(capsys, 5, "hf2dcp", packed, packed.parent / "dcp")
    assert f"{name} (layers.0.mlp.experts.down here) is not in the folder" in said
    assert f"{name}_blocks is in the folder but not in the model" in said


def llama4_with_images() -> Any:
    from transformers import Llama4Config, Llama4ForConditionalGeneration

    small = {"num_experts": 3, "expert_ffn_dim": 24}
    text = config_of(name="llama4", chunk=9, nope_every=2, moe=small).hf_config()
    sides = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = {
        **sides, "intermediate_size": 16, "vision_output_dim": 16, "projector_input_dim": 16,
        "projector_output_dim": 16, "image_size": 28, "patch_size": 14,
    }  # fmt: skip
    return Llama4ForConditionalGeneration(Llama4Config(text_config=text, vision_config=vision))


def gemma3_with_images() -> Any:
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    scaling = {"factor": 8.0}
    text = config_of(name="gemma3", window=9, full_every=2, rope_scaling=scaling).hf_config()
    sides = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = {**sides, "intermediate_size": 16, "image_size": 28, "patch_size": 14}
    of_images = {"image_token_index": 319, "boi_token_index": 318, "eoi_token_index": 317}
    return Gemma3ForConditionalGeneration(
        Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=1, **of_images)
    )


@pytest.mark.parametrize("make", [llama4_with_images, gemma3_with_images])
def test_of_a_model_that_sees_images_the_language_model_is_read(
    tmp_path: Path, make: Callable[[], Any]
) -> None:
    theirs = make()
    theirs.eval().save_pretrained(tmp_path / "hf")
    assert any("vision" in name for name in load_file(tmp_path / "hf" / SINGLE))
    assert convert("hf2dcp", tmp_path / "hf", tmp_path / "dcp", "--verify") == 0
    assert convert("hf2hf", tmp_path / "hf", tmp_path / "text") == 0
    tokens = torch.arange(50)[None]
    with torch.no_grad():
        expected = theirs(tokens).logits
        found = open_model(tmp_path / "dcp", dtype=Dtype.FP32).model(tokens)
        again = loaded_by_transformers(tmp_path / "text")(tokens).logits
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(again, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("model", [{}, {"name": "deepseek_v3"}])
def test_float8_weights_are_scaled_block_by_block(
    tmp_path: Path, model: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As DeepSeek publishes them; the product is checked in float64, a number at a time."""
    monkeypatch.setattr("trainer.engine.checkpoint.tensors.BLOCK_BYTES", 700)
    config = config_of(**model)
    plain = hf_folder(tmp_path / "plain", config, tokenizer=False)
    settings = json.loads((plain / CONFIG).read_text())
    settings["quantization_config"] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [16, 24],
    }
    tensors, wanted = {}, {}
    for name, weight in tensors_of(plain).items():
        tensors[name] = wanted[name] = weight
        if weight.dim() != 2 or not name.endswith("_proj.weight"):
            continue
        rows, columns = weight.shape
        scales = torch.rand(-(-rows // 16), -(-columns // 24)) / 50
        row, column = torch.arange(rows)[:, None] // 16, torch.arange(columns) // 24
        packed = (weight / scales[row, column]).clamp(-448, 448).to(torch.float8_e4m3fn)
        wanted[name] = (packed.double() * scales[row, column].double()).float()
        tensors |= {name: packed, f"{name}_scale_inv": scales}
    folder = tmp_path / "packed"
    folder.mkdir()
    save_file(tensors, folder / SINGLE)
    (folder / CONFIG).write_text(json.dumps(settings))
    assert any(each.dtype is torch.float8_e4m3fn for each in tensors.values())
    assert convert("hf2dcp", folder, tmp_path / "dcp", "--verify") == 0
    assert convert("hf2hf", folder, tmp_path / "back") == 0
    assert "quantization_config" not in json.loads((tmp_path / "back" / CONFIG).read_text())
    found = tensors_of(tmp_path / "back")
    assert same_bits(
        {name: found[name] for name in wanted if name in found},
        {name: wanted[name] for name in wanted if name in found},
    )
    assert len(found.keys() & wanted.keys()) > 10
    settings["quantization_config"].pop("weight_block_size")
    (folder / CONFIG).write_text(json.dumps(settings))
    assert convert("hf2dcp", folder, tmp_path / "other") == 5
