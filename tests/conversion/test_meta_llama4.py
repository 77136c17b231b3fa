"""Llama 4 in Meta's original format gives the logits of transformers' model."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conversion.models import transformers_model
from tests.conversion.run import convert, refused
from tests.formats.hf_folders import config_of
from trainer.engine.inference.inputs import Dtype
from trainer.engine.inference.open import open_model
from trainer.model_zoo.llama4.config import Llama4Config
from trainer.model_zoo.llama4.meta import config_from_params

SIZES: dict[str, Any] = {
    "name": "llama4",
    "dim": 32,
    "n_layers": 4,
    "n_heads": 4,
    "n_kv_heads": 2,
    "head_dim": 8,
    "ffn_dim": 48,
    "norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "chunk": 9,
    "nope_every": 2,
    "temperature_floor": 4,
    "moe": {"num_experts": 3, "expert_ffn_dim": 24, "experts_per_token": 1},
}
PARAMS: dict[str, Any] = {
    "dim": 32,
    "n_layers": 4,
    "n_heads": 4,
    "n_kv_heads": 2,
    "ffn_exp": 4.0,
    "ffn_dim_multiplier": 1.2,
    "multiple_of": 16,
    "norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "use_scaled_rope": False,
    "attention_chunk_size": 9,
    "nope_layer_interval": 2,
    "use_qk_norm": True,
    "attn_temperature_tuning": True,
    "floor_scale": 4,
    "attn_scale": 0.1,
    "vision_args": {"dim": 8},
    "moe_args": {"num_experts": 3, "top_k": 1, "interleave_moe_layer_step": 2},
}


def put_experts(files: Any, put: Any, state: Any, meta: str, path: str) -> None:
    put(meta + "router_DE", state[path + "router.weight"].T, None)
    put(meta + "global_gate_stats_3E", torch.zeros(3, 3), None)
    words = {"w_in_shared_FD": "gate", "w_swiglu_FD": "up", "w_out_shared_DF": "down"}
    for name, word in words.items():
        weight = state[f"{path}shared_expert.{word}_proj.weight"]
        put(f"{meta}{name}.weight", weight, 1 if word == "down" else 0)
    gate, up = state[path + "experts.gate_up_proj"].chunk(2, 2)  # [E, D, F]
    stacks = {"w_in_eD_F": gate, "w_swiglu_eD_F": up}
    for number, file in enumerate(files):
        for name, stack in stacks.items():
            piece = stack.chunk(len(files), 2)[number]
            file[f"{meta}experts.moe_{name}"] = piece.flatten(0, 1).contiguous()
        piece = state[path + "experts.down_proj"].chunk(len(files), 1)[number]  # [E, F, D]
        file[f"{meta}experts.moe_w_out_eF_D"] = piece.flatten(0, 1).contiguous()


def metas_files(theirs: Any, count: int) -> list[dict[str, Any]]:
    """Return the tensors of each file as Meta publishes them, from transformers' model.

    The inverse of transformers' convert_llama4_weights_to_hf.py.
    """
    files: list[dict[str, Any]] = [{} for _ in range(count)]
    state = {name.removeprefix("model."): value for name, value in theirs.state_dict().items()}

    def put(name: str, value: Tensor, dim: int | None) -> None:
        pieces = [value] * count if dim is None else value.chunk(count, dim)
        for file, piece in zip(files, pieces, strict=True):
            file[name] = piece.contiguous().clone()

    put("tok_embeddings.weight", state["embed_tokens.weight"], 1)
    put("output.weight", state["lm_head.weight"], 0)
    put("norm.weight", state["norm.weight"], None)
    for i in range(4):
        own, meta = f"layers.{i}.", f"layers.{i}."
        put(meta + "attention.wqkv.layer_norm_weight", state[own + "input_layernorm.weight"], None)
        projections = [state[f"{own}self_attn.{word}_proj.weight"] for word in "qkv"]
        for number, file in enumerate(files):
            rows = [each.chunk(count)[number] for each in projections]
            file[meta + "attention.wqkv.weight"] = torch.cat(rows)
            file[meta + "attention.wqkv._extra_state"] = io.BytesIO(b"state")
        put(meta + "attention.wo.weight", state[own + "self_attn.o_proj.weight"], 1)
        norm, path = state[own + "post_attention_layernorm.weight"], own + "feed_forward."
        meta += "feed_forward."
        if i % 2 == 0:
            put(meta + "mlp.layer_norm_weight", norm, None)
            halves = [state[f"{path}{word}_proj.weight"] for word in ("gate", "up")]
            for number, file in enumerate(files):
                rows = [half.chunk(count)[number] for half in halves]
                file[meta + "mlp.fc1_weight"] = torch.cat(rows)
            put(meta + "mlp.fc2_weight", state[path + "down_proj.weight"], 1)
            continue
        put(meta + "norm.weight", norm, None)
        put_experts(files, put, state, meta, path)
    files[0]["vision_embeddings.vision_adapter.mlp.c_fc.weight"] = torch.zeros(2)
    return files


def write(folder: Path, files: list[dict[str, Any]], params: dict[str, Any]) -> Path:
    folder.mkdir()
    (folder / "params.json").write_text(json.dumps(params))
    for number, tensors in enumerate(files):
        torch.save(tensors, folder / f"consolidated.{number:02d}.pth")
    return folder


@pytest.mark.parametrize("files", [pytest.param(1, marks=pytest.mark.matrix), 2])
def test_logits_are_those_of_transformers_model(files: int, tmp_path: Path) -> None:
    theirs = transformers_model(config_of(**SIZES))
    source = write(tmp_path / "meta", metas_files(theirs, files), PARAMS)
    assert convert("meta2dcp", source, tmp_path / "dcp", "--verify") == 0
    model = open_model(tmp_path / "dcp", dtype=Dtype.FP32).model
    tokens = torch.randint(300, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = theirs(tokens).logits
        torch.testing.assert_close(model(tokens), expected, atol=1e-5, rtol=1e-5)


def test_what_does_not_fit_is_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = metas_files(transformers_model(config_of(**SIZES)), 2)
    for file in files:
        del file["layers.1.feed_forward.router_DE"]
        file["layers.2.more"] = torch.zeros(2)
    source = write(tmp_path / "meta", files, PARAMS)
    said = refused(capsys, 5, "meta2dcp", source, tmp_path / "dcp")
    assert "layers.1.feed_forward.router_DE is not in the files" in said
    assert "layers.2.more is in the files but not in the model" in said


@pytest.mark.parametrize("flavor", ["17bx16e", "17bx128e"])
def test_published_sizes_are_those_of_our_flavors(flavor: str) -> None:
    # params.json of Llama 4 Scout and Maverick
    shared = {**PARAMS, "dim": 5120, "n_layers": 48, "n_heads": 40, "n_kv_heads": 8}
    shared |= {"attention_chunk_size": 8192, "nope_layer_interval": 4, "floor_scale": 8192.0}
    own: dict[str, dict[str, Any]] = {
        "17bx16e": {
            "use_scaled_rope": True,
            "moe_args": {"num_experts": 16, "interleave_moe_layer_step": 1},
        },
        "17bx128e": {
            "use_qk_norm": False,
            "moe_args": {"num_experts": 128, "interleave_moe_layer_step": 2},
        },
    }
    found = config_from_params({**shared, **own[flavor]}, 202048, 8192, 16384)
    wanted = Llama4Config.model_validate(Llama4Config.flavors[flavor])
    assert found.model_dump() == wanted.model_dump()
