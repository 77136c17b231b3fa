"""Meta's original format: the same model, whatever the number of files."""

from __future__ import annotations

import base64
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conversion.meta_reference import PARAMS, logits, weights, write
from tests.conversion.models import loaded_by_transformers, tensors_of
from tests.conversion.run import convert, refused
from trainer.engine.checkpoint import tensors as tensor_module
from trainer.engine.checkpoint.manifest import read_manifest
from trainer.engine.inference.inputs import Dtype
from trainer.engine.inference.open import open_model
from trainer.model_zoo.llama3.config import Llama3Config
from trainer.model_zoo.llama3.meta import config_from_params


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("files", [1, 2])
def test_logits_are_those_of_metas_model(
    tmp_path: Path, files: int, scaled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_module, "BLOCK_BYTES", 500)  # blocks that cut through heads
    params = {**PARAMS, "use_scaled_rope": True} if scaled else PARAMS
    theirs = weights(params)
    source = write(tmp_path / "meta", theirs, params, files)
    assert convert("meta2dcp", source, tmp_path / "dcp", "--verify") == 0
    model = open_model(tmp_path / "dcp", dtype=Dtype.FP32).model
    tokens = torch.randint(320, (2, 200), generator=torch.Generator().manual_seed(1))
    expected = logits(theirs, params, tokens)
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), expected, atol=1e-5, rtol=1e-5)
        assert convert("dcp2hf", tmp_path / "dcp", tmp_path / "hf") == 0
        found = loaded_by_transformers(tmp_path / "hf")(tokens).logits
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_queries_are_turned_by_transformers_rule(tmp_path: Path) -> None:
    theirs = weights(PARAMS)
    source = write(tmp_path / "meta", theirs, PARAMS, 2)
    assert convert("meta2dcp", source, tmp_path / "dcp") == 0
    assert convert("dcp2hf", tmp_path / "dcp", tmp_path / "hf") == 0
    found = tensors_of(tmp_path / "hf")
    for name, heads in (("q", 4), ("k", 2)):
        weight = theirs[f"layers.1.attention.w{name}.weight"]
        rows, columns = weight.shape
        # `permute` of transformers' convert_llama_weights_to_hf.py
        cut = weight.view(heads, rows // heads // 2, 2, columns)
        expected = cut.transpose(1, 2).reshape(rows, columns)
        assert torch.equal(found[f"model.layers.1.self_attn.{name}_proj.weight"], expected)


PUBLISHED: dict[str, dict[str, Any]] = {
    # params.json of the released models
    "8b": {
        "dim": 4096, "ffn_dim_multiplier": 1.3, "multiple_of": 1024, "n_heads": 32,
        "n_kv_heads": 8, "n_layers": 32, "norm_eps": 1e-05, "rope_theta": 500000.0,
        "use_scaled_rope": True, "vocab_size": 128256,
    },
    "70b": {
        "dim": 8192, "ffn_dim_multiplier": 1.3, "multiple_of": 4096, "n_heads": 64,
        "n_kv_heads": 8, "n_layers": 80, "norm_eps": 1e-05, "rope_theta": 500000.0,
        "use_scaled_rope": True, "vocab_size": 128256,
    },
    "1b": {
        "dim": 2048, "ffn_dim_multiplier": 1.5, "multiple_of": 256, "n_heads": 32,
        "n_kv_heads": 8, "n_layers": 16, "norm_eps": 1e-05, "rope_theta": 500000.0,
        "use_scaled_rope": True, "vocab_size": 128256,
    },
}  # fmt: skip


@pytest.mark.parametrize("flavor", list(PUBLISHED))
def test_published_sizes_are_those_of_our_flavors(flavor: str) -> None:
    found = config_from_params(PUBLISHED[flavor], 128256)
    expected = Llama3Config(flavor=flavor)
    assert found.model_dump(exclude={"flavor"}) == expected.model_dump(exclude={"flavor"})


def test_llama_2s_embedding_cut_by_columns_is_joined(tmp_path: Path) -> None:
    theirs = weights(PARAMS)
    params = {**PARAMS, "vocab_size": -1}
    source = write(tmp_path / "meta", theirs, params, 2)
    for number in range(2):
        file = source / f"consolidated.{number:02d}.pth"
        part = torch.load(file, weights_only=True)
        columns = theirs["tok_embeddings.weight"].chunk(2, dim=1)[number].clone()
        torch.save({**part, "tok_embeddings.weight": columns}, file)
    assert convert("meta2dcp", source, tmp_path / "dcp") == 0
    assert convert("dcp2hf", tmp_path / "dcp", tmp_path / "hf") == 0
    found = tensors_of(tmp_path / "hf")["model.embed_tokens.weight"]
    assert torch.equal(found, theirs["tok_embeddings.weight"])


def llama3_vocabulary() -> str:
    """Return 128,000 made-up tokens in tiktoken's format: bytes, pairs, and pairs with a byte."""
    single = [bytes([byte]) for byte in range(256)]
    pairs = [one + other for one in single for other in single]
    longer = [pair + byte for pair in pairs for byte in single[97:98]]
    tokens = [*single, *pairs, *longer][:128000]
    assert len(tokens) == 128000
    lines = (f"{base64.b64encode(token).decode()} {rank}" for rank, token in enumerate(tokens))
    return "\n".join(lines) + "\n"


@pytest.mark.matrix
def test_metas_tokenizer_goes_along(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    params = {**PARAMS, "dim": 8, "n_heads": 2, "vocab_size": 128256}
    source = write(tmp_path / "meta", weights(params, 32), params)
    (source / "tokenizer.model").write_text(llama3_vocabulary())
    assert convert("meta2dcp", source, tmp_path / "dcp") == 0
    shutil.rmtree(source)
    tokenizer = open_model(tmp_path / "dcp").tokenizer
    assert tokenizer.eos_id == 128001  # <|end_of_text|>
    assert convert("dcp2hf", tmp_path / "dcp", tmp_path / "hf") == 0
    theirs = AutoTokenizer.from_pretrained(tmp_path / "hf")
    text = "Grüße an alle Welt"
    assert theirs.encode(text, add_special_tokens=False) == list(tokenizer.encode(text))
    assert theirs.decode(tokenizer.encode(text)) == text
    assert theirs.eos_token_id == 128001


def test_another_tokenizer_model_is_left_out_and_said_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write(tmp_path / "meta", weights(PARAMS), PARAMS)
    for content in (b"\x0a\x0e\x0a\x05<unk>", b"IQ== 0\n"):  # sentencepiece's; too short
        (source / "tokenizer.model").write_bytes(content)
        assert convert("meta2dcp", source, tmp_path / f"dcp{len(content)}") == 0
        assert "note: the tokenizer cannot be used: " in capsys.readouterr().out


def test_without_a_projection_the_ends_are_tied(tmp_path: Path) -> None:
    theirs = weights(PARAMS)
    del theirs["output.weight"]
    source = write(tmp_path / "meta", theirs, PARAMS)
    assert convert("meta2dcp", source, tmp_path / "dcp") == 0
    assert read_manifest(tmp_path / "dcp").recipe["model"]["tie_embeddings"] is True


BAD_PARAMS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "missing": ({"dim": None, "n_heads": None}, ["does not say dim", "does not say n_heads"]),
    "huge": ({"dim": 2**28}, ["dim = 268435456, but there are 48288 numbers in all"]),
    "more than any": ({"dim": 10**30}, ["params.json says dim = 10000"]),
    "many layers": ({"n_layers": 10**9}, ["n_layers = 1000000000, but there are 21 tensors"]),
    "negative": ({"n_layers": -1, "vocab_size": 0}, ["says n_layers = -1", "says vocab_size = 0"]),
    "a text": ({"n_heads": "4"}, ['says n_heads = "4"']),
    "a yes": ({"n_layers": True}, ["says n_layers = true"]),
    "a list": ({"norm_eps": [1e-5]}, ["says norm_eps = [1e-05]"]),
    "odd heads": ({"n_heads": 3}, ["must be a multiple of n_kv_heads"]),
    "quantized": ({"quantization_args": {}}, ["describes experts or quantized"]),
    "no yes or no": ({"use_scaled_rope": 3}, ["says use_scaled_rope = 3"]),
    "other sizes": (
        {"n_layers": 1, "ffn_dim_multiplier": 1.0},
        [
            "layers.0.feed_forward.w1.weight is [112, 32] there and [96, 32] here",
            "layers.1.attention.wq.weight is in consolidated.00.pth but not in the model",
        ],
    ),
}


@pytest.mark.parametrize("case", list(BAD_PARAMS))
def test_impossible_params_are_refused_all_at_once(
    tmp_path: Path, case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    change, messages = BAD_PARAMS[case]
    params = {key: value for key, value in (PARAMS | change).items() if value is not None}
    source = write(tmp_path / "meta", weights(PARAMS), params)
    said = refused(capsys, 5, "meta2dcp", source, tmp_path / "dcp")
    for message in messages:
        assert message in said


@pytest.mark.parametrize("text", ["[]", "{", '{"dim": NaN}', '{"dim": 1e999}', "\x80", " " * 2**21])
def test_a_hostile_params_json_is_refused(
    tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write(tmp_path / "meta", weights(PARAMS), PARAMS)
    (source / "params.json").write_text(text)
    assert "params.json" in refused(capsys, 5, "meta2dcp", source, tmp_path / "dcp")


def test_a_missing_file_of_several_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write(tmp_path / "meta", weights(PARAMS), PARAMS, 2)
    (source / "consolidated.00.pth").unlink()
    said = refused(capsys, 5, "meta2dcp", source, tmp_path / "dcp")
    assert "does not hold consolidated.00.pth" in said
    (source / "consolidated.01.pth").rename(source / "consolidated.00.pth")
    said = refused(capsys, 5, "meta2dcp", source, tmp_path / "dcp")
    assert "layers.0.attention.wq.weight is [16, 32] there and [32, 32] here" in said


def test_files_that_disagree_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = weights(PARAMS)
    source = write(tmp_path / "meta", theirs, PARAMS, 2)
    part = torch.load(source / "consolidated.01.pth", weights_only=True)
    part["output.weight"] = theirs["output.weight"]
    part.pop("norm.weight")
    torch.save(part, source / "consolidated.01.pth")
    said = refused(capsys, 5, "meta2dcp", source, tmp_path / "dcp")
    assert "output.weight is [320, 32] there and [160, 32] here" in said
    assert "norm.weight (head.norm.weight here) is not in consolidated.01.pth" in said
