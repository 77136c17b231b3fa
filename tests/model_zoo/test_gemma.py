"""Gemma 2 and Gemma 3: equal to transformers, and of the published sizes."""

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
from trainer.engine.core.registry import models
from trainer.engine.formats.hf_match import match
from trainer.kernels.cross_entropy.reference import linear_cross_entropy
from trainer.model_zoo.base import Constant
from trainer.model_zoo.sizes import SettingsError

SIZES = {
    "dim": 32,
    "n_layers": 3,
    "n_heads": 4,
    "n_kv_heads": 2,
    "ffn_dim": 48,
    "vocab_size": VOCAB,
    "init_std": 0.2,
    "window": 5,
    "full_every": 2,
}
# Caps so low that they bend every score and logit.
CAPS = {"attention_softcap": 1.5, "logit_softcap": 0.7}
VARIANTS = {
    "gemma2": CAPS,
    "gemma2, published caps": {"query_pre_attn_scalar": 11, "init_std": 0.4},
    "gemma2, no caps": {"attention_softcap": 0.0, "logit_softcap": 0.0},
    "gemma2, untied": {**CAPS, "tie_embeddings": False, "n_kv_heads": 1, "head_dim": 12},
    "gemma3": {"query_pre_attn_scalar": 11},
    "gemma3, scaled rope": {"rope_scaling": {"factor": 8.0}, "rope_theta": 100.0},
    "gemma3, all windows": {"full_every": 6, "local_rope_theta": 50.0, "n_kv_heads": 1},
    "gemma3, untied": {"tie_embeddings": False, "head_dim": 12, "norm_eps": 1e-2},
}
# Of the safetensors files on the Hugging Face hub: google/gemma-2-NAME and gemma-3-NAME-pt; of
# Gemma 3's 4b, 12b and 27b without the vision tower (416,866,032) and the projector.
PARAMETERS = {
    "gemma2": {"2b": 2_614_341_888, "9b": 9_241_705_984, "27b": 27_227_128_320},
    "gemma3": {
        "270m": 268_098_176,
        "1b": 999_885_952,
        "4b": 4_300_079_472 - 416_866_032 - 1152 * 2561,
        "12b": 12_187_325_040 - 416_866_032 - 1152 * 3841,
        "27b": 27_432_406_640 - 416_866_032 - 1152 * 5377,
    },
}


def model_of(variant, attention="auto", **changes):
    family, values = variant.partition(",")[0], VARIANTS[variant]
    config = models[family].model_validate({**SIZES, "name": family, **values, **changes})
    model = built(config, attention)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.sub_(1)  # the scale is 1 + weight
    return model


@pytest.mark.parametrize("attention", ["matmul", *also("sdpa")])
@pytest.mark.parametrize("variant", quick(VARIANTS, "gemma2", "gemma3", "gemma3, scaled rope"))
def test_logits_and_gradients_equal_those_of_transformers(variant, attention):
    ours = model_of(variant, attention)
    assert_equal(ours, twin(ours), tokens())


@pytest.mark.parametrize("variant", quick(VARIANTS, "gemma2", "gemma3"))
def test_decoding_with_a_cache_equals_the_full_pass(variant):
    assert_cache_changes_nothing(model_of(variant), [7, 1, 4], tokens(3, 12))


@pytest.mark.parametrize("attention", ["matmul", *also("sdpa")])
@pytest.mark.parametrize("variant", quick(VARIANTS, "gemma2", "gemma3"))
def test_documents_in_a_row_are_as_if_alone(variant, attention):
    assert_documents_are_as_if_alone(model_of(variant, attention), [7, 20, 4])


@pytest.mark.parametrize("family", ["gemma2", "gemma3"])
def test_bf16_is_as_near_to_fp32_as_that_of_transformers(family):
    """Norms, and the scale of the embedding, are rounded where transformers rounds them."""
    ours = model_of(family)
    theirs, row = twin(ours), tokens()
    with torch.no_grad():
        exact = ours(row)
        ours.compute_dtype = torch.bfloat16
        errors = [
            (logits.float() - exact).norm() / exact.norm()
            for logits in (ours(row), theirs.bfloat16()(row).logits)
        ]
    assert errors[0] < 1.2 * errors[1] < 0.1


@pytest.mark.parametrize(("family", "attention"), [("gemma2", "sdpa"), *also(("gemma3", "matmul"))])
def test_blocks_compile_without_breaks(family, attention):
    torch._dynamo.reset()
    eager, model = (model_of(family, attention) for _ in range(2))
    for block in model.layers:
        block.compile(backend="aot_eager", fullgraph=True)
    row = tokens()
    losses = [each(row, labels=row, loss=linear_cross_entropy) for each in (eager, model)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(*losses)
    for mine, other in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-4, atol=1e-5)
    torch._dynamo.reset()


def test_norms_start_with_a_scale_of_one():
    for family in ("gemma2", "gemma3"):
        model = model_of(family)
        names = [name for name, _ in model.named_parameters() if name.endswith("norm.weight")]
        assert len(names) == 3 * (4 if family == "gemma2" else 6) + 1
        assert {model.initial_values(name) for name in names} == {Constant(0.0)}


def test_every_other_block_of_gemma2_and_every_sixth_of_gemma3_sees_the_whole_row():
    assert reach(model_of("gemma2", n_layers=1)) == list(range(16, 21))
    for family, last in (("gemma2", 2), ("gemma3", 6)):
        config = models[family](window=64)
        assert next(n for n in range(1, 13) if config.window_of(n - 1) is None) == last
    two = model_of("gemma2", n_layers=2)
    assert reach(two) == list(range(21))


@pytest.mark.parametrize(
    ("family", "flavor", "count"),
    [(family, *each) for family, flavors in PARAMETERS.items() for each in flavors.items()],
)
def test_flavors_have_the_published_number_of_parameters(family, flavor, count):
    config = models[family](flavor=flavor)
    assert sum(map(prod, config.parameter_shapes().values())) == count
    assert config.query_scale == pytest.approx(
        {"gemma2 27b": (128 / 144) ** 0.5, "gemma3 27b": (128 / 168) ** 0.5}.get(
            f"{family} {flavor}", 1.0
        )
    )


def published(**changes):
    """Return what google/gemma-3-4b-pt says of its language model."""
    return {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
        **changes,
    }


def test_config_json_of_either_transformers_is_read():
    gemma3 = models["gemma3"]
    found = gemma3.from_hf_config(published())
    assert found == gemma3(flavor="4b").model_copy(update={"flavor": "debug"})
    again = gemma3.from_hf_config(found.hf_config())
    assert again == found
    old = published(rope_theta=5e5, rope_local_base_freq=2e4, sliding_window_pattern=3)
    changed = gemma3.from_hf_config(old)
    assert (changed.rope_theta, changed.local_rope_theta, changed.full_every) == (5e5, 2e4, 3)
    assert gemma3.from_hf_config(changed.hf_config()) == changed


def test_a_cap_of_null_is_none():
    config = models["gemma2"]().with_vocab(64)
    settings = config.hf_config() | {"final_logit_softcapping": None}
    assert type(config).from_hf_config(settings).logit_softcap == 0.0
    [problem] = match({}, {}, config, settings).problems
    assert problem == "model.logit_softcap is 30.0, config.json says 0.0"
    left_out = {key: x for key, x in settings.items() if key != "final_logit_softcapping"}
    assert type(config).from_hf_config(left_out).logit_softcap == 30.0


@pytest.mark.parametrize(
    ("family", "change", "key"),
    [
        ("gemma2", {"hidden_activation": "gelu"}, "hidden_activation"),
        ("gemma2", {"layer_types": ["full_attention", "sliding_attention"] * 2}, "layer_types"),
        ("gemma3", {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        (
            "gemma3",
            {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
            "sliding_attention.rope_type",
        ),
        ("gemma3", {"rope_parameters": {"full_attention": {"rope_type": "linear"}}}, "factor"),
    ],
)
def test_what_config_json_asks_for_and_is_not_done_is_refused(family, change, key):
    config = models[family]().with_vocab(64)
    with pytest.raises(SettingsError, match=key):
        type(config).from_hf_config(config.hf_config() | change)
