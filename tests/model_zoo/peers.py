"""Small Llamas of ours, and the same weights in transformers."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from trainer.engine.parallel.materialize import materialize
from trainer.kernels.choose import choose
from trainer.model_zoo.llama3.config import Llama3Config

SIZES = {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 48, "vocab_size": 61}
VARIANTS = {
    "plain": {},
    "tied": {"tie_embeddings": True},
    "one head a group": {"n_kv_heads": 4},
    "one group": {"n_kv_heads": 1},
    "wide heads": {"head_dim": 20},
    "scaled rope": {
        "rope_theta": 1000.0,
        "rope_scaling": {"factor": 8.0, "original_max_seq_len": 16},
    },
}


def our_model(*, attention="auto", **changes):
    """Return a model whose weights are large enough for every part to matter."""
    config = Llama3Config.model_validate(SIZES | {"init_std": 0.2, "norm_eps": 1e-5} | changes)
    model = config.build(choose({"attention": attention}, "cpu", 64))
    materialize(model, torch.device("cpu"), seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.copy_(torch.rand(parameter.shape, generator=generator) + 0.5)
    return model


def their_model(ours):
    """Return transformers' model with the weights of ours."""
    config = ours.config
    rope = {"rope_type": "default", "rope_theta": config.rope_theta}
    if (scaling := config.rope_scaling) is not None:
        rope |= {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_seq_len,
        }
    theirs = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=config.dim,
            intermediate_size=config.ffn_dim,
            num_hidden_layers=config.n_layers,
            num_attention_heads=config.n_heads,
            num_key_value_heads=config.n_kv_heads,
            head_dim=config.head_width,
            vocab_size=config.vocab,
            rms_norm_eps=config.norm_eps,
            max_position_embeddings=config.max_seq_len,
            rope_parameters=rope,
            tie_word_embeddings=config.tie_embeddings,
            attn_implementation="eager",
        )
    )
    weights = {config.layout.to_hf(name): value for name, value in ours.state_dict().items()}
    missing, unexpected = theirs.load_state_dict(weights, strict=False)
    assert not unexpected
    assert missing == (["lm_head.weight"] if config.tie_embeddings else [])
    return theirs.eval()
