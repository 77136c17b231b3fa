"""A Hugging Face folder of another model is refused with all that differs, before any weight."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from trainer.engine.formats.hf_load import load_huggingface

from .hf_folders import SCALING, VARIANTS, config_of, empty_model, refusal, weights_of, write


def test_a_folder_that_says_untied_must_hold_the_projection(tmp_path: Path) -> None:
    config = config_of()
    tensors = weights_of(config)
    del tensors["lm_head.weight"]
    message = refusal(write(tmp_path / "source", tensors, config.hf_config())).message
    assert "lm_head.weight (head.proj.weight here) is not in the folder" in message


@pytest.mark.parametrize("last_rows", [1, 0])
def test_a_tied_model_refuses_another_projection(
    tmp_path: Path, last_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.engine.checkpoint.tensors.BLOCK_BYTES", 384)
    tied = config_of(tie_embeddings=True)
    tensors = weights_of(tied)
    head = tensors["model.embed_tokens.weight"].clone()
    head[-1, -1] += 1e-6
    head = head[: len(head) - last_rows].clone()
    error = refusal(write(tmp_path / "source", tensors | {"lm_head.weight": head}), tied)
    assert "lm_head.weight is there and differs from model.embed_tokens" in error.message
    assert "model.tie_embeddings" in error.hint


def test_all_misfits_are_reported_at_once(tmp_path: Path) -> None:
    tensors = weights_of(config_of())
    tensors["model.norm.wieght"] = tensors.pop("model.norm.weight")
    tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(5, 32)
    tensors["model.layers.1.mlp.up_proj.weight"] = torch.zeros(48, 32, dtype=torch.int8)
    tensors["model.layers.7.mlp.up_proj.bias"] = torch.zeros(48)
    message = refusal(write(tmp_path / "source", tensors)).message
    near = 'did you mean "model.norm.wieght"?'
    up = "model.layers.0.mlp.up_proj.weight"
    for line in (
        f"model.norm.weight (head.norm.weight here) is not in the folder; {near}",
        "model.norm.wieght is in the folder but not in the model",
        f"{up} is [5, 32] there and [48, 32] here (layers.0.mlp.up.weight)",
        "model.layers.1.mlp.up_proj.weight is stored as I8: quantized weights are not read",
        "model.layers.7.mlp.up_proj.bias is in the folder but not in the model",
    ):
        assert line in message


def test_many_misfits_are_counted(tmp_path: Path) -> None:
    tensors = {f"unknown.{i}": torch.zeros(1) for i in range(50)}
    message = refusal(write(tmp_path / "source", tensors)).message
    assert message.count("\n") == 21
    assert message.endswith("and 51 more")


OLD_SPELLING = {
    "rope_parameters": None,
    "rope_theta": 5e5,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1,
        "high_freq_factor": 4,
        "original_max_position_embeddings": 32,
    },
}


def test_both_spellings_of_rotary_settings_are_understood(tmp_path: Path) -> None:
    config = config_of(**VARIANTS["scaled"])
    source = write(tmp_path / "source", weights_of(config), config.hf_config() | OLD_SPELLING)
    assert load_huggingface(source, empty_model(config), config) == []
    unscaled = config_of(rope_theta=5e5)
    error = refusal(source, unscaled)
    assert "model.rope_scaling.factor is 1.0, config.json says 4.0" in error.message
    assert "rope_scaling.original_max_seq_len = 32" in error.hint


@pytest.mark.parametrize(
    ("change", "message", "hint"),
    [
        ({"rms_norm_eps": 1e-6}, "model.norm_eps is 1e-05, config.json says 1e-06", "norm_eps = 1"),
        (
            {"num_attention_heads": 8, "head_dim": 4},
            "model.n_heads is 4, config.json says 8",
            "set in [model]: n_heads = 8, head_dim = 4",
        ),
        ({"num_key_value_heads": 4}, "model.n_kv_heads is 2, config.json says 4", "n_kv_heads = 4"),
        ({"rope_parameters": {"rope_theta": 7.0}}, "model.rope_theta is 10000.0", "rope_theta = 7"),
        (
            {"model_type": "gemma"},
            'says model_type = "gemma", model "llama3" does "llama" only',
            "another library",
        ),
        ({"hidden_act": "gelu"}, 'hidden_act = "gelu"', "another library"),
        ({"model_type": None, "mlp_bias": True}, "mlp_bias = true (biases in", "another library"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2}},
            'rope_type = "yarn" (how rotary frequencies are scaled), model "llama3" does "def',
            "another library",
        ),
    ],
)
def test_settings_that_shapes_do_not_show_are_compared(
    tmp_path: Path, change: dict[str, Any], message: str, hint: str
) -> None:
    settings = config_of().hf_config() | change
    if "rope_scaling" in change:
        del settings["rope_parameters"]
    error = refusal(write(tmp_path / "source", weights_of(config_of()), settings))
    assert message in error.message
    assert hint in error.hint


def test_a_number_that_fp32_rounded_is_the_same_and_what_is_left_out_is_compared(
    tmp_path: Path,
) -> None:
    config = config_of()
    settings = config.hf_config() | {"rms_norm_eps": 9.999999747378752e-06}
    source = write(tmp_path / "source", weights_of(config), settings)
    assert load_huggingface(source, empty_model(config), config) == []
    del settings["rms_norm_eps"]
    error = refusal(write(tmp_path / "other", weights_of(config), settings))
    assert "model.norm_eps is 1e-05, config.json means 1e-06" in error.message


def test_a_scaled_model_learns_how_to_take_an_unscaled_folder(tmp_path: Path) -> None:
    plain = config_of()
    source = write(tmp_path / "source", weights_of(plain), plain.hf_config())
    error = refusal(source, config_of(rope_scaling=SCALING))
    assert error.hint == "set in [model]: rope_scaling.factor = 1.0"
    same = config_of(rope_scaling=SCALING | {"factor": 1.0})
    load_huggingface(source, empty_model(same), same)
