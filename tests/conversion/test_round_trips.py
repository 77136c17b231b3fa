"""From Hugging Face to a checkpoint of ours and back: every bit is as it was."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

from tests.conversion.models import (
    CASES,
    EOS,
    VARIANTS,
    hf_folder,
    loaded_by_transformers,
    same_bits,
    tensors_of,
)
from tests.conversion.run import convert
from tests.formats.hf_folders import config_of, empty_model
from trainer.engine.assemble.initial_weights import load_initial_weights
from trainer.engine.checkpoint.manifest import read_manifest, verify
from trainer.engine.inference.inputs import Dtype
from trainer.engine.inference.open import open_model

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("shard_size", ["1GB", "20KB"])
@pytest.mark.parametrize("variant", CASES)
def test_there_and_back_gives_the_same_bits(
    tmp_path: Path, variant: str, shard_size: str, dtype: str
) -> None:
    config = config_of(**VARIANTS[variant])
    source = hf_folder(tmp_path / "hf", config, dtype=DTYPES[dtype], shard_size=shard_size)
    assert (len(list(source.glob("*.safetensors"))) > 1) == (shard_size != "1GB")
    assert convert("hf2dcp", source, tmp_path / "dcp", "--verify") == 0
    assert verify(tmp_path / "dcp") == []
    assert convert("dcp2hf", tmp_path / "dcp", tmp_path / "back", "--verify") == 0
    assert same_bits(tensors_of(tmp_path / "back"), tensors_of(source))
    tokens = torch.randint(config.vocab, (2, 100), generator=torch.Generator().manual_seed(1))
    one, other = loaded_by_transformers(source), loaded_by_transformers(tmp_path / "back")
    with torch.no_grad():
        assert torch.equal(one(tokens).logits, other(tokens).logits)
    assert other.dtype is DTYPES[dtype]
    assert {path.name for path in tmp_path.iterdir()} == {"hf", "dcp", "back"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `hf`, and `dcp` and `back` that were made of it."""
    root = tmp_path_factory.mktemp("converted")
    hf_folder(root / "hf")
    assert convert("hf2dcp", root / "hf", root / "dcp") == 0
    assert convert("dcp2hf", root / "dcp", root / "back") == 0
    return root


def test_our_model_gives_transformers_logits(folders: Path) -> None:
    model = open_model(folders / "dcp", dtype=Dtype.FP32).model
    theirs = loaded_by_transformers(folders / "back")
    tokens = torch.randint(320, (2, 100), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = theirs(tokens).logits
        torch.testing.assert_close(model(tokens), expected, atol=1e-5, rtol=1e-5)


def test_torch_dcp_reads_the_checkpoint(folders: Path) -> None:
    expected = tensors_of(folders / "hf")
    layout = config_of().layout
    state = {
        f"model.{layout.from_hf(name)}": torch.full_like(tensor, 7)
        for name, tensor in expected.items()
    }
    reader = HuggingFaceStorageReader(str(folders / "dcp"))
    dcp.load(state, storage_reader=reader, no_dist=True)
    for name, tensor in expected.items():
        assert torch.equal(state[f"model.{layout.from_hf(name)}"], tensor), name


def test_the_tokenizer_goes_along(folders: Path) -> None:
    from transformers import AutoTokenizer

    one = AutoTokenizer.from_pretrained(folders / "hf")
    other = AutoTokenizer.from_pretrained(folders / "back")
    ours = open_model(folders / "dcp").tokenizer
    text = "def walk(top): return 'Ünïcode'"
    assert one.encode(text) == other.encode(text) == list(ours.encode(text))
    assert (other.eos_token, other.model_max_length) == (EOS, 77)
    assert ours.eos_id == other.eos_token_id
    assert json.loads((folders / "back" / "config.json").read_text())["eos_token_id"] is not None


def test_a_checkpoint_that_was_moved_keeps_its_tokenizer(folders: Path, tmp_path: Path) -> None:
    shutil.copytree(folders / "hf", tmp_path / "hf")
    assert convert("hf2dcp", tmp_path / "hf", tmp_path / "dcp") == 0
    shutil.rmtree(tmp_path / "hf")
    (tmp_path / "dcp").rename(tmp_path / "moved")
    assert "tokenizer.json" in read_manifest(tmp_path / "moved").files
    assert open_model(tmp_path / "moved").tokenizer.vocab_size == 300
    assert convert("dcp2hf", tmp_path / "moved", tmp_path / "back") == 0
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "back" / name).read_bytes() == (folders / "hf" / name).read_bytes()


def test_a_folder_without_a_tokenizer_is_taken_as_bytes_and_said_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = hf_folder(tmp_path / "hf", tokenizer=False)
    assert convert("hf2dcp", source, tmp_path / "dcp") == 0
    assert "note: " in (said := capsys.readouterr().out)
    assert "give the tokenizer with --tokenizer" in said
    assert open_model(tmp_path / "dcp").tokenizer.fingerprint == "bytes"


def test_a_tokenizer_can_be_given(folders: Path, tmp_path: Path) -> None:
    source = hf_folder(tmp_path / "hf", tokenizer=False)
    words = ["hf2dcp", source, tmp_path / "dcp", "--tokenizer", folders / "hf"]
    assert convert(*words) == 0
    theirs = open_model(folders / "dcp").tokenizer
    assert open_model(tmp_path / "dcp").tokenizer.fingerprint == theirs.fingerprint


@pytest.mark.parametrize(("word", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_weights_are_cast_once(folders: Path, tmp_path: Path, word: str, dtype: Any) -> None:
    assert convert("hf2hf", folders / "hf", tmp_path / "cast", "--dtype", word, "--verify") == 0
    expected = {name: tensor.to(dtype) for name, tensor in tensors_of(folders / "hf").items()}
    assert same_bits(tensors_of(tmp_path / "cast"), expected)
    assert loaded_by_transformers(tmp_path / "cast").dtype is dtype
    assert convert("hf2dcp", tmp_path / "cast", tmp_path / "dcp") == 0
    model = open_model(tmp_path / "dcp", dtype=Dtype.FP32).model
    name = "layers.1.mlp.up.weight"
    theirs = config_of().layout.to_hf(name) or ""
    assert torch.equal(model.get_parameter(name), expected[theirs].float())


def test_a_folder_is_cut_anew(folders: Path, tmp_path: Path) -> None:
    assert convert("hf2hf", folders / "hf", tmp_path / "cut", "--shard-size", "30KB") == 0
    assert len(list((tmp_path / "cut").glob("*.safetensors"))) > 2
    assert same_bits(tensors_of(tmp_path / "cut"), tensors_of(folders / "hf"))
    kept = json.loads((folders / "hf" / "config.json").read_text())
    found = json.loads((tmp_path / "cut" / "config.json").read_text())
    assert {k: v for k, v in found.items() if k != "torch_dtype"} == kept
    logits = [loaded_by_transformers(tmp_path / "cut"), loaded_by_transformers(folders / "hf")]
    tokens = torch.arange(50)[None]
    assert torch.equal(*(model(tokens).logits for model in logits))


def test_files_that_only_transformers_reads_are_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = hf_folder(tmp_path / "hf", tokenizer=False)
    (source / "tokenizer.model").write_bytes(b"\x0a\x0e\x0a\x05<unk>")
    assert convert("hf2hf", source, tmp_path / "out") == 0
    assert "note" not in capsys.readouterr().out
    for name in ("tokenizer.model", "generation_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()


def test_a_state_dict_goes_there_and_back(folders: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        "[run]\nsteps = 1\n[model]\ndim = 32\nn_layers = 2\nn_heads = 4\nn_kv_heads = 2\n"
        "ffn_dim = 48\nvocab_size = 320\nmax_seq_len = 256\n"
    )
    assert convert("dcp2torch", folders / "dcp", tmp_path / "model.pt", "--verify") == 0
    state = torch.load(tmp_path / "model.pt", weights_only=True)
    layout, expected = config_of().layout, tensors_of(folders / "hf")
    assert same_bits({layout.to_hf(name) or "": each for name, each in state.items()}, expected)
    for number, content in enumerate((state, {"epoch": 3, "model": expected})):
        torch.save(content, tmp_path / "in.pt")
        target = tmp_path / f"dcp{number}"
        words = ["torch2dcp", tmp_path / "in.pt", target, "--recipe", recipe, "--verify"]
        assert convert(*words) == 0
        assert convert("dcp2hf", target, tmp_path / f"hf{number}") == 0
        assert same_bits(tensors_of(tmp_path / f"hf{number}"), expected)


def test_a_run_starts_from_a_converted_checkpoint(folders: Path, tmp_path: Path) -> None:
    model = empty_model(config_of())
    load_initial_weights(model, config_of(), folders / "dcp")
    expected = tensors_of(folders / "hf")
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, expected[config_of().layout.to_hf(name) or ""])
