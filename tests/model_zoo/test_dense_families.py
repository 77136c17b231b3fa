"""Mistral, Qwen2, OLMo 2 and Phi-3: equal to transformers, and of the published sizes."""

from math import prod

import pytest
import torch

from tests.cases import also, quick
from tests.model_zoo.peers import (
    VOCAB,
    assert_cache_changes_nothing,
    assert_documents_are_as_if_alone,
    assert_equal,
    built,
    reach,
    tokens,
    twin,
)
from tests.train.plans import recipe_with
from trainer.engine.core.registry import models
from trainer.engine.formats.hf_match import match
from trainer.engine.lora.adapter_weights import merge_adapters
from trainer.engine.lora.apply import add_adapters
from trainer.engine.lora.tables import LoRA
from trainer.engine.recipe.checks.checks import check
from trainer.model_zoo.sizes import SettingsError

SIZES = {
    "dim": 32,
    "n_layers": 2,
    "n_heads": 4,
    "n_kv_heads": 2,
    "ffn_dim": 48,
    "vocab_size": VOCAB,
    "init_std": 0.2,
}
LONGROPE = {"short_factor": [1.0, 1.5, 2.0], "long_factor": [1.0, 4.0, 9.0], "factor": 4.0}
WIDE = {"head_dim": 12, "norm_eps": 1e-2, "rope_theta": 1e6}
VARIANTS = {
    "mistral": {},
    "mistral, a window": {"window": 5, "n_kv_heads": 1},
    "mistral, wide heads": {**WIDE, "window": 40},
    "qwen2": {"tie_embeddings": True},
    "qwen2, one group": {"n_kv_heads": 1},
    "qwen2, wide heads": WIDE,
    "olmo2": {},
    "olmo2, one group": {"n_kv_heads": 1, "tie_embeddings": True},
    "olmo2, wide heads": WIDE,
    "phi3": {"rotary_fraction": 0.75, "rope_scaling": {**LONGROPE, "original_max_seq_len": 40}},
    "phi3, long rows": {
        "rotary_fraction": 0.75,
        "rope_scaling": {**LONGROPE, "original_max_seq_len": 16, "use_long": True},
    },
    "phi3, a window": {"window": 5, "n_kv_heads": 1, "tie_embeddings": True},
}
# Of the safetensors files on the Hugging Face hub: mistralai/Mistral-7B-v0.1, -7B-v0.3,
# -Nemo-Base-2407, -Small-24B-Base-2501, -Large-Instruct-2407, Qwen/Qwen2.5-NAME,
# microsoft/Phi-3-mini-4k-instruct, -3-medium-4k-instruct, -4-mini-instruct, phi-4,
# allenai/OLMo-2-0425-1B, -1124-7B, -1124-13B, -0325-32B.
PARAMETERS = {
    "mistral": {
        "7b-v0.1": 7_241_732_096,
        "7b": 7_248_023_552,
        "nemo-12b": 12_247_782_400,
        "small-24b": 23_572_403_200,
        "large-123b": 122_610_069_504,
    },
    "qwen2": {
        "0.5b": 494_032_768,
        "1.5b": 1_543_714_304,
        "3b": 3_085_938_688,
        "7b": 7_615_616_512,
        "14b": 14_770_033_664,
        "32b": 32_763_876_352,
        "72b": 72_706_203_648,
    },
    "phi3": {
        "3-mini-4k": 3_821_079_552,
        "3-medium-4k": 13_960_238_080,
        "4-mini": 3_836_021_760,
        "4": 14_659_507_200,
    },
    "olmo2": {
        "1b": 1_484_916_736,
        "7b": 7_298_617_344,
        "13b": 13_716_198_400,
        "32b": 32_234_279_936,
    },
}


def model_of(variant, attention="auto", **changes):
    family, values = variant.partition(",")[0], VARIANTS[variant]
    config = models[family].model_validate({**SIZES, "name": family, **values, **changes})
    model = built(config, attention)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


@pytest.mark.parametrize("attention", ["matmul", *also("sdpa")])
@pytest.mark.parametrize(
    "variant", quick(VARIANTS, "mistral, a window", "qwen2", "olmo2, one group")
)
def test_logits_and_gradients_equal_those_of_transformers(variant, attention):
    ours = model_of(variant, attention)
    assert_equal(ours, twin(ours), tokens())


@pytest.mark.parametrize("variant", quick(VARIANTS, "mistral, a window", "olmo2, one group"))
def test_decoding_with_a_cache_equals_the_full_pass(variant):
    assert_cache_changes_nothing(model_of(variant), [7, 1, 4], tokens(3, 12))


@pytest.mark.parametrize("variant", quick(VARIANTS, "olmo2, wide heads"))
def test_documents_in_a_row_are_as_if_alone(variant):
    assert_documents_are_as_if_alone(model_of(variant), [7, 20, 4])


def test_a_window_is_all_that_a_block_sees():
    """Position 20 of a block with a window of 5 sees 16 to 20."""
    assert reach(model_of("mistral, a window", n_layers=1)) == list(range(16, 21))
    assert reach(model_of("mistral", n_layers=1)) == list(range(21))


def test_norms_of_olmo2_are_of_the_halves_outputs_and_of_all_heads():
    """By the formulas of arXiv:2501.00656, section 3.1, in float64."""

    def norm(x, layer):
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * layer.weight

    model = model_of("olmo2", n_layers=1).double()
    block, hidden = model.layers[0], torch.randn(2, 1, 32, dtype=torch.float64)
    # One position alone: attention is its value, whatever queries and keys are.
    value = block.attention.v(hidden).view(2, 1, 2, 8).repeat_interleave(2, 2).flatten(2)
    x = hidden + norm(block.attention.o(value), block.attention.post_norm)
    mlp = block.mlp
    inner = torch.nn.functional.silu(mlp.gate(x)) * mlp.up(x)
    expected = x + norm(mlp.down(inner), mlp.post_norm)
    cos, sin = model.rotation(torch.arange(1))
    torch.testing.assert_close(block(hidden, cos, sin), expected, rtol=1e-9, atol=1e-9)
    query, key = torch.randn(2, 1, 4, 8), torch.randn(2, 1, 2, 8)
    attention = block.attention.float()
    found, _ = attention.apply_rotary(query, key, cos.float(), sin.float())
    wide = norm(query.flatten(2), attention.q_norm).view_as(query)
    torch.testing.assert_close(found, wide, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "flavor", "count"),
    [(family, *each) for family, flavors in PARAMETERS.items() for each in flavors.items()],
)
def test_flavors_have_the_published_number_of_parameters(family, flavor, count):
    shapes = models[family](flavor=flavor).parameter_shapes().values()
    assert sum(map(prod, shapes)) == count


@pytest.mark.parametrize("seq_len", [4, 200])
def test_scores_are_counted_within_windows(seq_len):
    config = models["mistral"](window=64, n_heads=4, head_dim=16)
    pairs = sum(min(position + 1, 64) for position in range(seq_len))
    found = config.attention_multiplications(0, seq_len)
    assert found == pytest.approx(2 * pairs * 4 * 16 / seq_len, rel=0.3 if seq_len < 5 else 0.02)


def test_what_config_json_asks_for_and_is_not_done_is_refused():
    config = models["qwen2"]().with_vocab(64)
    for change in ({"use_sliding_window": True}, {"layer_types": ["sliding_attention"] * 4}):
        with pytest.raises(SettingsError, match=next(iter(change))):
            type(config).from_hf_config(config.hf_config() | change)


def test_a_window_of_null_is_none_and_contradicts_a_given_one():
    config = models["mistral"](window=9).with_vocab(64)
    [problem] = match({}, {}, config, config.hf_config() | {"sliding_window": None}).problems
    assert problem == "model.window is 9, config.json says null"
    assert type(config).from_hf_config(config.hf_config() | {"sliding_window": None}).window is None
    left_out = {key: x for key, x in config.hf_config().items() if key != "sliding_window"}
    assert type(config).from_hf_config(left_out).window == 4096  # as transformers takes it


def test_adapters_leave_biases_where_they_are():
    model, x = model_of("qwen2"), tokens()
    expected = model(x)
    table = LoRA(rank=2, targets=["*.attention.[qkv].weight"])
    add_adapters(model, model.config.layout, table)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # As they start: B adds nothing.
            if name.endswith(("lora_a", "lora_b")):
                parameter.fill_(float(name.endswith("lora_a")))
    assert torch.equal(model(x), expected)
    merge_adapters(model)
    assert torch.equal(model(x), expected)


def test_factors_of_long_rope_are_one_a_pair_and_of_rows_as_long_as_the_recipe_s():
    values = {"name": "phi3", "dim": 32, "n_heads": 4, "rotary_fraction": 0.75}
    with pytest.raises(ValueError, match="needs 3 numbers, one a pair: long_factor has 2"):
        models["phi3"].model_validate(
            {**values, "rope_scaling": {"short_factor": [1.0] * 3, "long_factor": [1.0] * 2}}
        )
    with pytest.raises(ValueError, match="rotates 3 numbers of a head: RoPE turns pairs"):
        models["phi3"].model_validate({**values, "rotary_fraction": 0.375})
    scaling = {**LONGROPE, "original_max_seq_len": 16}
    recipe = recipe_with(model={**values, "rope_scaling": scaling})
    [(_, problem, hint)] = [each for each in check(recipe, 1) if each[0][0] == "data"]
    assert problem.startswith("seq_len (32) is over model.rope_scaling.original_max_seq_len (16)")
    assert "use_long = true" in hint
    scaling["use_long"] = True
    found = check(recipe_with(model={**values, "rope_scaling": scaling}), 1)
    assert not any(each[0][0] == "data" for each in found)
