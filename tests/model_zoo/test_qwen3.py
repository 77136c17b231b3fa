"""Qwen3 against transformers', and its sizes against published ones."""

import pytest
from transformers import AutoConfig

from tests.model_zoo.peers import (
    VOCAB,
    assert_cache_changes_nothing,
    assert_equal,
    built,
    num_parameters,
    tokens,
    twin,
)
from trainer.model_zoo.qwen3.config import Qwen3Config
from trainer.model_zoo.sizes import SettingsError

SIZES = {
    "dim": 32,
    "n_layers": 2,
    "n_heads": 4,
    "n_kv_heads": 2,
    "head_dim": 12,
    "ffn_dim": 48,
    "vocab_size": VOCAB,
    "init_std": 0.2,
}
VARIANTS = {
    "plain": {},
    "tied": {"tie_embeddings": True},
    "one group, far rotation": {"n_kv_heads": 1, "rope_theta": 1e6},
    "coarse epsilon": {"norm_eps": 1e-2},
    "experts": {"moe": {"num_experts": 6, "expert_ffn_dim": 24}},
    "experts weighted by their scores": {
        "moe": {"experts_per_token": 3, "expert_ffn_dim": 20, "normalize": False}
    },
}
# Of the safetensors files of Qwen/Qwen3-NAME on the Hugging Face hub.
PARAMETERS = {
    "0.6b": 596_049_920,
    "1.7b": 1_720_574_976,
    "4b": 4_022_468_096,
    "8b": 8_190_735_360,
    "14b": 14_768_307_200,
    "32b": 32_762_123_264,
    "30b-a3b": 30_532_122_624,
    "235b-a22b": 235_093_634_560,
}


def model_of(attention="auto", **changes):
    return built(Qwen3Config.model_validate(SIZES | changes), attention)


@pytest.mark.parametrize("attention", ["matmul", "sdpa"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_gradients_equal_those_of_transformers(variant, attention):
    ours = model_of(attention, **VARIANTS[variant])
    assert_equal(ours, twin(ours), tokens())


def test_decoding_with_a_cache_equals_the_full_pass():
    assert_cache_changes_nothing(model_of(), [7, 1, 4], tokens(3, 12))


@pytest.mark.parametrize("flavor", PARAMETERS)
def test_flavors_have_the_published_number_of_parameters(flavor):
    assert num_parameters(Qwen3Config(flavor=flavor)) == PARAMETERS[flavor]


def test_what_config_json_leaves_out_is_what_transformers_takes():
    required = {
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "intermediate_size": 96,
        "vocab_size": 512,
        # transformers counts 32 where none are given, and so cannot build this one.
        "num_key_value_heads": 4,
    }
    full = AutoConfig.for_model("qwen3", **required).to_dict()
    assert Qwen3Config.from_hf_config(
        {"model_type": "qwen3", **required}
    ) == Qwen3Config.from_hf_config(full)


def test_sliding_windows_are_refused():
    settings = Qwen3Config().with_vocab(64).hf_config() | {"use_sliding_window": True}
    with pytest.raises(SettingsError, match="use_sliding_window = true"):
        Qwen3Config.from_hf_config(settings)
