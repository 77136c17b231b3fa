"""GGUF files against the packages gguf and transformers, and against hostile ones."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from tests.conversion.models import hf_folder, loaded_by_transformers, same_bits, tensors_of
from tests.conversion.run import convert, refused
from tests.formats.hf_folders import config_of
from trainer.engine.checkpoint.tensors import InMemoryTensor
from trainer.engine.conversion.convert import TARGET_DTYPES
from trainer.engine.conversion.gguf import Q8Packed, Q8Rows
from trainer.engine.core.errors import CheckpointError
from trainer.engine.formats.gguf_names import NAMES, read_sizes, write_sizes
from trainer.model_zoo.layout import translate

SCALING = {"factor": 8.0, "original_max_seq_len": 32}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"name": "qwen3", "head_dim": 128},
    "scaled": {"rope_theta": 5e5, "rope_scaling": SCALING},
    "tied": {"tie_embeddings": True},
    "qwen2": {"name": "qwen2"},
    "olmo2": {"name": "olmo2"},
    "mistral": {"name": "mistral"},
}
INTERLEAVED = ("llama", "scaled", "tied", "mistral")
QUICK = (("llama", "q8_0"), ("qwen3", "fp16"))
SIZES = {"dim": 64, "ffn_dim": 96}
DTYPES = {"fp32": "F32", "fp16": "F16", "bf16": "BF16", "q8_0": "Q8_0"}


@pytest.mark.parametrize(
    ("model", "dtype"),
    [
        pytest.param(model, dtype, marks=[] if (model, dtype) in QUICK else [pytest.mark.matrix])
        for model in MODELS
        for dtype in DTYPES
    ],
)
def test_a_model_goes_to_gguf_and_back(
    model: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.engine.checkpoint.tensors.BLOCK_BYTES", 5000)
    folder = hf_folder(tmp_path / "hf", config_of(**SIZES | MODELS[model]))
    assert convert("hf2dcp", folder, tmp_path / "dcp") == 0
    file = tmp_path / "model.gguf"
    assert convert("dcp2gguf", tmp_path / "dcp", file, "--dtype", dtype, "--verify") == 0
    assert convert("gguf2dcp", file, tmp_path / "again", "--verify") == 0
    assert convert("dcp2hf", tmp_path / "again", tmp_path / "back", "--dtype", "fp32") == 0

    reader = gguf.GGUFReader(file)
    there = {tensor.name: tensor for tensor in reader.tensors}
    found, given = tensors_of(tmp_path / "back"), tensors_of(folder)
    config = config_of(**SIZES | MODELS[model])
    for name, weight in given.items():
        ours = config.layout.from_hf(name) or ""
        stored = there[translate(ours, NAMES) or ""]
        assert stored.tensor_type.name == (DTYPES[dtype] if weight.dim() > 1 else "F32")
        values = torch.from_numpy(gguf.dequantize(stored.data, stored.tensor_type).copy())
        if stored.tensor_type.name == "Q8_0":
            packed = gguf.quantize(weight.numpy(), gguf.GGMLQuantizationType.Q8_0)
            weight = torch.from_numpy(gguf.dequantize(packed, gguf.GGMLQuantizationType.Q8_0))
        elif weight.dim() > 1:
            weight = weight.to(TARGET_DTYPES[dtype])
        assert torch.equal(found[name], weight.float()), name
        if name.endswith(("q_proj.weight", "k_proj.weight")) and model in INTERLEAVED:
            # `permute` of llama.cpp's convert_hf_to_gguf.py
            heads = 4 if name.endswith("q_proj.weight") else 2
            cut = weight.view(heads, 2, len(weight) // heads // 2, -1)
            weight = cut.swapaxes(1, 2).reshape(weight.shape)
        assert torch.equal(values.view(weight.shape), weight.float()), name
    # transformers reads no frequency factors, and no olmo2
    if dtype == "fp32" and model not in ("scaled", "olmo2"):
        x = torch.randint(256, (2, 40), generator=torch.Generator().manual_seed(1))
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf").eval()
        assert torch.equal(theirs(x).logits, loaded_by_transformers(folder)(x).logits)
    _compare_tokenizer(reader, folder)


def _compare_tokenizer(reader: Any, folder: Path) -> None:
    tokens = [str(bytes(part), "utf-8") for part in _strings(reader, "tokenizer.ggml.tokens")]
    # AutoTokenizer adds tokens of its own to some families'.
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    assert tokens[: len(theirs)] == theirs.convert_ids_to_tokens(range(len(theirs)))
    assert len(tokens) == 320
    end = reader.fields["tokenizer.ggml.eos_token_id"]
    assert int(end.parts[end.data[0]][0]) == theirs.eos_token_id
    merges = [str(bytes(part), "utf-8") for part in _strings(reader, "tokenizer.ggml.merges")]
    content = json.loads((folder / "tokenizer.json").read_text())
    assert merges == [" ".join(pair) for pair in content["model"]["merges"]]
    pre = reader.fields["tokenizer.ggml.pre"]
    assert bytes(pre.parts[pre.data[0]]) == b"gpt-2"


def _strings(reader: Any, key: str) -> list[Any]:
    field = reader.fields[key]
    return [field.parts[number] for number in field.data]


def test_q8_0_is_packed_as_the_reference_does() -> None:
    weight = torch.randn(7, 96, generator=torch.Generator().manual_seed(2))
    weight[2], weight[3, :32], weight[4, 5] = 0, 1e-9, -40.0
    weight[5] = torch.arange(96) - 47.5  # halves
    packed = Q8Packed(InMemoryTensor(weight))
    theirs = gguf.quantize(weight.numpy(), gguf.GGMLQuantizationType.Q8_0)
    assert np.array_equal(packed.read(0, 7).numpy(), theirs)
    assert torch.equal(packed.read(2, 5), packed.read(0, 7)[2:5])
    rows = Q8Rows(packed, (7, 96))
    wanted = gguf.dequantize(theirs, gguf.GGMLQuantizationType.Q8_0)
    assert np.array_equal(rows.read(0, 7).numpy(), wanted)
    assert torch.equal(Q8Packed(rows).read(4, 7), packed.read(4, 7))
    weight[0, 0] = 1e7
    with pytest.raises(CheckpointError, match="too large for q8_0: 1e\\+07"):
        packed.read(0, 1)


def _write(file: Path, changes: dict[str, Any], kind: Any = None) -> Path:
    """Write a file of another writer: a llama of one block."""
    writer = gguf.GGUFWriter(file, "llama")
    values = {"block_count": 1, "context_length": 64, "embedding_length": 32}
    values |= {"feed_forward_length": 48, "attention.head_count": 4}
    for key, value in (values | changes).items():
        if value is not None:
            add = writer.add_string if isinstance(value, str) else writer.add_uint32
            add(f"llama.{key}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_float32("llama.rope.freq_base", 10000.0)
    generator = np.random.default_rng(0)
    shapes = {"attn_q": (32, 32), "attn_k": (32, 32), "attn_v": (32, 32), "attn_output": (32, 32)}
    shapes |= {"ffn_gate": (48, 32), "ffn_up": (48, 32), "ffn_down": (32, 48)}
    shapes |= {"attn_norm": (32,), "ffn_norm": (32,)}
    named = {f"blk.0.{name}.weight": shape for name, shape in shapes.items()}
    named |= {"token_embd.weight": (320, 32), "output_norm.weight": (32,)}
    for name, shape in named.items():
        writer.add_tensor(name, generator.standard_normal(shape).astype(np.float32))
    if kind is not None:
        packed = np.zeros((32, 18), np.uint8)
        writer.add_tensor("output.weight", packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def test_a_file_of_another_writer_is_read(tmp_path: Path) -> None:
    file = _write(tmp_path / "other.gguf", {})
    assert convert("gguf2dcp", file, tmp_path / "dcp", "--verify") == 0
    assert convert("dcp2gguf", tmp_path / "dcp", tmp_path / "again.gguf") == 0
    one, other = (gguf.GGUFReader(path).tensors for path in (file, tmp_path / "again.gguf"))
    values = [{t.name: torch.from_numpy(np.array(t.data)) for t in each} for each in (one, other)]
    assert same_bits(*values)


@pytest.mark.parametrize(
    ("changes", "kind", "said"),
    [
        ({"rope.scaling.type": "yarn"}, None, 'llama.rope.scaling.type = "yarn", which is not'),
        ({"expert_count": 4}, None, "does not say llama.expert_used_count"),
        ({"attention.sliding_window": 9}, None, "llama.attention.sliding_window = 9"),
        ({"block_count": None}, None, "does not say llama.block_count"),
        ({"block_count": 2**31}, None, "n_layers"),
        ({}, gguf.GGMLQuantizationType.Q4_0, "output.weight is of the type Q4_0, which is not"),
    ],
)
def test_what_is_not_done_is_refused_by_name(
    tmp_path: Path,
    changes: dict[str, Any],
    kind: Any,
    said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = _write(tmp_path / "other.gguf", changes, kind)
    assert said in refused(capsys, 5, "gguf2dcp", file, tmp_path / "target")


def test_models_that_gguf_is_not_written_for_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = hf_folder(tmp_path / "hf", config_of("gpt_oss"), tokenizer=False)
    assert convert("hf2dcp", folder, tmp_path / "dcp") == 0
    said = refused(capsys, 5, "dcp2gguf", tmp_path / "dcp", tmp_path / "target.gguf")
    known = "llama3, olmo2, qwen2, qwen3, mixtral, mistral are written"
    assert f'GGUF is not written for this "gpt_oss": {known}' in said


def test_windows_that_llama_cpp_does_not_compute_are_not_written() -> None:
    with pytest.raises(ValueError, match=r"model\.window is 9, less than model\.max_seq_len"):
        write_sizes(config_of("mistral", window=9))
    as_long = config_of("mistral", window=256)
    assert write_sizes(as_long) == write_sizes(config_of())


def test_a_recipe_says_that_a_file_is_read_as_mistral() -> None:
    metadata = write_sizes(config_of("mistral"))
    assert read_sizes(metadata)["name"] == "llama3"
    assert read_sizes(metadata, "mistral")["name"] == "mistral"
    assert read_sizes(metadata, "mixtral")["name"] == "llama3"


def test_hostile_files_are_refused_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = _write(tmp_path / "whole.gguf", {}).read_bytes()
    offset = whole.index(b"token_embd.weight") + len(b"token_embd.weight")
    many, kinds = struct.pack("<Q", 2**60), struct.pack("<QI", 0, 0)
    text = struct.pack("<Q", 3) + b"key"
    head = whole[:8] + struct.pack("<QQ", 0, 1) + text
    files = {
        "it ends inside its header": whole[:300],
        "reaches past its end": whole[:-4000],
        "entries; at most": whole[:8] + many + whole[16:],
        "of GGUF's version 16777216": whole[:4] + b"\0\0\0\1" + whole[8:],
        "is no GGUF file": b"PK" + whole[2:],
        "has 4294967295 dimensions": whole[:offset] + b"\xff" * 4 + whole[offset + 4 :],
        "has the shape": whole[: offset + 4] + many * 2 + whole[offset + 20 :],
        "an array of the type 9": head + struct.pack("<IIQ", 9, 9, 1) + kinds,
        "unknown type 99": head + struct.pack("<I", 99),
        "its header has more than": head + struct.pack("<IQ", 8, 2**40),
        "not UTF-8": head + struct.pack("<IQ", 8, 1) + b"\xff",
        "an alignment of 0": whole[:8]
        + struct.pack("<QQQ", 0, 1, 17)
        + b"general.alignment"
        + struct.pack("<II", 4, 0),
    }
    for number, (said, content) in enumerate(files.items()):
        path = tmp_path / f"{number}.gguf"
        path.write_bytes(content)
        assert said in refused(capsys, 5, "gguf2dcp", path, tmp_path / "target"), said
    generator = np.random.default_rng(1)
    for _ in range(20):  # any other damage to the header: refused or read, never a traceback
        content = bytearray(whole)
        for position in generator.integers(0, offset + 200, 3):
            content[position] = generator.integers(256)
        (tmp_path / "noise.gguf").write_bytes(content)
        code = convert("gguf2dcp", tmp_path / "noise.gguf", tmp_path / "out")
        assert code in (0, 5)
        assert "unexpected" not in capsys.readouterr().err
        if code == 0:
            (tmp_path / "out").rename(tmp_path / f"read-{generator.integers(2**60)}")
