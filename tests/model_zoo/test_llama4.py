"""Llama 4 against transformers', and against its own definitions."""

import pytest
import torch

from tests.model_zoo.peers import VOCAB, assert_equal, built, num_parameters, reach, tokens, twin
from trainer.model_zoo.llama4.config import Llama4Config
from trainer.model_zoo.sizes import SettingsError

SIZES = {
    "dim": 32,
    "n_layers": 4,
    "n_heads": 4,
    "n_kv_heads": 2,
    "head_dim": 12,
    "ffn_dim": 48,
    "vocab_size": VOCAB,
    "init_std": 0.2,
    "chunk": 8,
    "temperature_floor": 4,
    "temperature_scale": 0.7,
    "moe": {"num_experts": 5, "expert_ffn_dim": 24},
}
VARIANTS = {
    "plain": {},
    "experts everywhere": {"moe_every": 1},
    "experts nowhere": {"moe_every": 9},
    "two experts a token": {"moe": {**SIZES["moe"], "experts_per_token": 2}},
    "tied": {"tie_embeddings": True},
    "without norms of heads": {"qk_norm": False},
    "every other block sees all": {"nope_every": 2},
    "chunks longer than the row": {"chunk": 100},
    "stretched": {"rope_scaling": {"factor": 8.0, "original_max_seq_len": 16}},
}


def model_of(attention="auto", **changes):
    return built(Llama4Config.model_validate(SIZES | changes), attention)


@pytest.mark.parametrize("attention", ["matmul", "sdpa"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_gradients_equal_those_of_transformers(variant, attention):
    ours = model_of(attention, **VARIANTS[variant])
    assert_equal(ours, twin(ours), tokens())


def test_what_is_far_reaches_a_token_through_the_blocks_without_rope_alone():
    """With one block of each kind, chunk 8: position 20 sees 16 to 20, then all."""
    assert reach(model_of(n_layers=1)) == list(range(16, 21))
    assert reach(model_of(n_layers=2, nope_every=2)) == list(range(21))


def test_the_scale_of_queries_is_that_of_the_paper():
    scale = model_of()._scale(torch.arange(12)).flatten()
    expected = [1 + 0.7 * torch.log1p(torch.tensor((p + 1) // 4.0)).item() for p in range(12)]
    assert scale.tolist() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("key", "value"),
    [("no_rope_layers", [1, 1, 0, 1]), ("layer_types", ["full_attention"] * 4)],
)
def test_other_orders_of_blocks_are_refused(key, value):
    settings = Llama4Config.model_validate(SIZES).hf_config()
    with pytest.raises(SettingsError, match=key):
        Llama4Config.from_hf_config({**settings, key: value})
    assert Llama4Config.from_hf_config({**settings, "no_rope_layers": []}).nope_every == 4


# Of the safetensors files of meta-llama/Llama-4-*, less the vision tower and its projection: the
# same 871,932,416 parameters in both.
PARAMETERS = {"17bx16e": 107_769_861_120, "17bx128e": 400_711_848_960}


@pytest.mark.parametrize("flavor", PARAMETERS)
def test_flavors_have_the_published_number_of_parameters(flavor):
    assert num_parameters(Llama4Config(flavor=flavor)) == PARAMETERS[flavor]


def test_a_table_of_experts_changes_a_flavor_and_does_not_replace_it():
    config = Llama4Config.model_validate({"flavor": "17bx128e", "moe": {"aux_weight": 0.1}})
    assert (config.moe.num_experts, config.moe.aux_weight) == (128, 0.1)
    with pytest.raises(ValueError, match=r"moe\.num_shared must be 1, not 0"):
        Llama4Config.model_validate({"moe": {"num_shared": 0}})
