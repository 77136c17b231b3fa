"""config.json files that others write: what is left out, and what differs between versions."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.conversion.models import hf_folder, loaded_by_transformers
from tests.conversion.run import convert
from tests.formats.hf_folders import config_of
from tests.model_zoo.peers import VOCAB, assert_equal, built, filled, tokens
from trainer.engine.conversion.sources import family_of
from trainer.engine.inference.inputs import Dtype
from trainer.engine.inference.open import open_model
from trainer.model_zoo.hf_settings import agree
from trainer.model_zoo.sizes import SettingsError

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": VOCAB}
DEEPSEEK = {
    **SIZES,
    "num_key_value_heads": 4,
    "intermediate_size": 48,
    "kv_lora_rank": 10,
    "q_lora_rank": 9,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 14,
    "moe_intermediate_size": 24,
    "n_routed_experts": 16,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
}
GROUPS = {"n_group": 4, "topk_group": 2}
GPT_OSS = {
    **SIZES,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "intermediate_size": 24,
    "sliding_window": 5,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
}
QWEN = {
    **SIZES,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "router_aux_loss_coef": 0.0,
}
YARN = {"rope_type": "yarn", "factor": 8.0}
LLAMA = {**SIZES, "intermediate_size": 48, "num_key_value_heads": None}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy leaves groups alone": (
        "deepseek_v2",
        {**DEEPSEEK, **GROUPS, "topk_method": "greedy"},
    ),
    "groups": ("deepseek_v2", {**DEEPSEEK, **GROUPS, "topk_method": "group_limited_greedy"}),
    "no method": ("deepseek_v2", {**DEEPSEEK, **GROUPS}),
    "latents' norms of v2": ("deepseek_v2", {**DEEPSEEK, "rms_norm_eps": 1e-3}),
    "latents' norms": ("deepseek_v3", {**DEEPSEEK, **GROUPS, "rms_norm_eps": 1e-3}),
    "groups left out": ("deepseek_v3", DEEPSEEK),
    "latent yarn without a length": (
        "deepseek_v3",
        {**DEEPSEEK, "max_position_embeddings": 64, "rope_scaling": {**YARN, "factor": None}},
    ),
    "latent yarn with a factor": (
        "deepseek_v3",
        {**DEEPSEEK, "rope_scaling": {**YARN, "attention_factor": 1.4, "mscale_all_dim": 0.9}},
    ),
    "attention_factor": ("gpt_oss", {**GPT_OSS, "rope_scaling": {**YARN, "attention_factor": 1.7}}),
    "yarn without a length": (
        "gpt_oss",
        {**GPT_OSS, "max_position_embeddings": 64, "rope_parameters": {**YARN, "truncate": None}},
    ),
    "no scaling at all": ("gpt_oss", {**GPT_OSS, "rope_theta": 5000.0}),
    "no norm_topk_prob": ("qwen3_moe", QWEN),
    "early name of longrope": (
        "phi3",
        {
            **SIZES,
            "intermediate_size": 48,
            "pad_token_id": None,
            "partial_rotary_factor": 0.5,
            "max_position_embeddings": 160,
            "original_max_position_embeddings": 40,
            "rope_scaling": {
                "type": "su",
                "short_factor": [1.0, 2.0],
                "long_factor": [3.0, 4.0],
                "original_max_position_embeddings": 40,
            },
        },
    ),
    "llama3 without a length": (
        "llama",
        {**LLAMA, "max_position_embeddings": 64, "rope_scaling": LLAMA3},
    ),
    "a length outside": (
        "llama",
        {**LLAMA, "original_max_position_embeddings": 32, "rope_scaling": LLAMA3},
    ),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_logits_and_gradients_are_those_of_transformers(case: str) -> None:
    kind, settings = CONFIGS[case]
    family = family_of({"model_type": kind}, Path())
    ours = built(family.from_hf_config({"model_type": kind, **settings, "num_mtp_layers": 0}))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, value in (*ours.named_parameters(), *ours.named_buffers()):
            if value.dim() > 1 or "bias" in name or "sinks" in name:
                value.copy_(0.2 * torch.randn(value.shape, generator=generator))
    config = AutoConfig.for_model(kind, **settings, attn_implementation="eager")
    assert_equal(ours, filled(AutoModelForCausalLM.from_config(config), ours), tokens())


@pytest.mark.parametrize("moe", [None, {"score": "softmax", "balance_bias": False}])
def test_folders_that_transformers_saves_of_deepseek_open(
    moe: dict[str, Any] | None, tmp_path: Path
) -> None:
    """Of V3 they name a depth of predictions and hold none; V2 has no bias of experts."""
    sizes = {"moe": {**moe, "normalize": False, "num_shared": 1}} if moe else {}
    folder = hf_folder(tmp_path / "hf", config_of("deepseek_v3", **sizes))
    path = folder / "config.json"
    path.write_text(path.read_text().replace('"num_nextn_predict_layers": 0,', ""))
    assert convert("hf2dcp", folder, tmp_path / "dcp") == 0
    x = torch.randint(256, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted = loaded_by_transformers(folder)(x).logits
        for source in (folder, tmp_path / "dcp"):
            found = open_model(source, dtype=Dtype.FP32).model(x)
            torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


def test_what_two_libraries_compute_differently_is_refused() -> None:
    family = family_of({"model_type": "deepseek_v2"}, Path())
    with pytest.raises(SettingsError, match="norm_topk_prob = true"):
        family.from_hf_config({"model_type": "deepseek_v2", **DEEPSEEK, "norm_topk_prob": True})


def test_numbers_agree_to_what_fp32_holds() -> None:
    assert agree(9.999999747378752e-06, 1e-05)
    assert agree(500000, 500000.0)
    assert not agree(1.00001e-05, 1e-05)
    assert not agree(1, 2)
    assert not agree(None, 1e-5)
