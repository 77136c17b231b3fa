"""Sizes from config.json: what is left out is what transformers takes, what cannot be is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.model_zoo.peers import FLAVORS
from trainer.engine.conversion.sources import family_of
from trainer.engine.core.errors import CheckpointError
from trainer.engine.core.registry import models
from trainer.model_zoo.llama3.config import Llama3Config
from trainer.model_zoo.sizes import SettingsError

REQUIRED = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 512,
}


@pytest.mark.parametrize(("family", "flavor"), FLAVORS)
def test_config_json_says_all_of_a_flavor(family: str, flavor: str) -> None:
    config = models[family](flavor=flavor).with_vocab(300)
    settings = config.hf_config()
    assert family_of(settings, Path("folder")) is models[family]
    found = models[family].from_hf_config(settings)
    computed = {"flavor", "head_dim"}
    assert found.model_dump(exclude=computed) == config.model_dump(exclude=computed)
    assert found.parameter_shapes() == config.parameter_shapes()


def test_what_is_left_out_is_what_transformers_takes() -> None:
    from transformers import LlamaConfig

    theirs = LlamaConfig(**{k: v for k, v in REQUIRED.items() if k != "model_type"})
    full = Llama3Config.from_hf_config(theirs.to_dict())
    assert Llama3Config.from_hf_config(REQUIRED).model_dump(exclude={"head_dim"}) == (
        full.model_dump(exclude={"head_dim"})
    )
    assert full.n_kv_heads == 4
    assert full.rope_scaling is None


def test_the_old_spelling_of_rotary_scaling_is_read() -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    old = {**REQUIRED, "rope_theta": 500000.0, "rope_scaling": scaling}
    new = {**REQUIRED, "rope_parameters": {"rope_theta": 500000.0, **scaling}}
    assert Llama3Config.from_hf_config(old) == Llama3Config.from_hf_config(new)
    assert Llama3Config.from_hf_config(old).rope_theta == 500000.0


@pytest.mark.parametrize(
    ("change", "problems"),
    [
        ({"hidden_size": None, "vocab_size": None}, ["does not say hidden_size", "vocab_size"]),
        ({"hidden_size": -1, "rms_norm_eps": "1e-5"}, ["dim = -1", 'norm_eps = "1e-5"']),
        ({"num_hidden_layers": 2**40}, ["n_layers = 1099511627776"]),
        ({"num_key_value_heads": 3}, ["n_heads (4) must be a multiple of n_kv_heads (3)"]),
        ({"hidden_act": "gelu", "attention_bias": True}, ["hidden_act", "attention_bias"]),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, ['rope_type = "yarn"']),
        (
            {
                "rope_parameters": {
                    "rope_type": "llama3",
                    "factor": float("nan"),
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                }
            },
            ["rope_scaling.factor"],
        ),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, ["low_freq", "high_freq"]),
    ],
)
def test_all_that_is_impossible_is_said(change: dict[str, Any], problems: list[str]) -> None:
    with pytest.raises(SettingsError) as raised:
        Llama3Config.from_hf_config(REQUIRED | change)
    assert len(raised.value.problems) == len(problems)
    for problem, part in zip(raised.value.problems, problems, strict=True):
        assert part in problem


def test_the_family_is_known_by_its_type() -> None:
    assert family_of(REQUIRED, Path("folder")) is Llama3Config
    for kind in ("gemma", None, 3, ["llama"]):
        with pytest.raises(CheckpointError, match="no model of ours is of the type"):
            family_of({"model_type": kind}, Path("folder"))
