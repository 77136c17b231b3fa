"""gpt-oss against transformers', and against its own definitions."""

import pytest
import torch

from tests.model_zoo.peers import VOCAB, assert_equal, built, num_parameters, reach, tokens, twin
from trainer.model_zoo.gpt_oss.config import GptOssConfig
from trainer.model_zoo.sizes import SettingsError

SIZES = {
    "dim": 32,
    "n_layers": 3,
    "n_heads": 4,
    "n_kv_heads": 2,
    "head_dim": 12,
    "window": 5,
    "vocab_size": VOCAB,
    "init_std": 0.2,
    "moe": {"num_experts": 5, "expert_ffn_dim": 24},
}
VARIANTS = {
    "plain": {},
    "tied": {"tie_embeddings": True},
    "every expert": {"moe": {**SIZES["moe"], "experts_per_token": 5}},
    "narrow limits": {"swiglu_limit": 0.5, "swiglu_alpha": 2.5},
    "stretched": {"rope_scaling": {"factor": 8.0, "original_max_seq_len": 16, "truncate": False}},
    "windows everywhere": {"full_every": 9},
}
# Of the bf16 weights, as counted on the Hugging Face hub for openai/gpt-oss-NAME.
PARAMETERS = {"20b": 20_914_757_184, "120b": 116_829_156_672}


def model_of(attention="auto", **changes):
    model = built(GptOssConfig.model_validate(SIZES | changes), attention)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
            if name.endswith("sinks"):
                parameter.copy_(2 * torch.randn(parameter.shape, generator=generator))
    return model


@pytest.mark.parametrize("attention", ["matmul", "sdpa"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_gradients_equal_those_of_transformers(variant, attention):
    ours = model_of(attention, **VARIANTS[variant])
    assert_equal(ours, twin(ours), tokens())


@pytest.mark.parametrize("flavor", PARAMETERS)
def test_flavors_have_the_published_number_of_parameters(flavor):
    assert num_parameters(GptOssConfig(flavor=flavor)) == PARAMETERS[flavor]


def test_a_window_is_all_that_a_block_sees_and_the_next_sees_the_row():
    """Position 20 of a block with a window of 5 sees 16 to 20."""
    assert reach(model_of(n_layers=1)) == list(range(16, 21))
    assert reach(model_of(n_layers=2)) == list(range(21))
    assert reach(model_of(n_layers=2, full_every=9)) == list(range(12, 21))


def test_sinks_take_attention_away():
    """With a sink far above all scores, blocks add what their biases and experts add."""
    model, x = model_of(n_layers=1), torch.randn(1, 9, 32)
    attention = model.layers[0].attention
    cos, sin = model.rotation(torch.arange(9))
    torch.nn.init.constant_(attention.sinks, 1e4)
    torch.testing.assert_close(attention(x, cos, sin), attention.o.bias.expand(1, 9, 32))


def test_biases_start_at_zero_and_other_weights_do_not():
    model = built(GptOssConfig.model_validate(SIZES))
    for name, parameter in model.named_parameters():
        is_zero = not parameter.any()
        assert is_zero == name.endswith("bias"), name


def test_what_is_not_of_this_family_is_refused():
    with pytest.raises(ValueError, match=r"moe\.score must be 'softmax', not 'sigmoid'"):
        GptOssConfig.model_validate(SIZES | {"moe": {"score": "sigmoid"}})
    settings = GptOssConfig.model_validate(SIZES).hf_config()
    with pytest.raises(SettingsError, match="layer_types"):
        GptOssConfig.from_hf_config({**settings, "layer_types": ["full_attention"] * 3})
    with pytest.raises(SettingsError, match="attention_bias"):
        GptOssConfig.from_hf_config({**settings, "attention_bias": False})


@pytest.mark.parametrize("seq_len", [4, 64, 200])
def test_scores_are_counted_within_windows(seq_len):
    config = GptOssConfig(window=64, n_heads=4, head_dim=16)
    pairs = sum(min(position + 1, 64) for position in range(seq_len))
    # Two products a pair; half of the row is what the base class counts of a causal one.
    exact = 2 * pairs * 4 * 16 / seq_len
    assert config.attention_multiplications(0, seq_len) == pytest.approx(
        exact, rel=0.3 if seq_len < 5 else 0.02
    )
    assert config.attention_multiplications(1, seq_len) == 4 * 16 * seq_len
