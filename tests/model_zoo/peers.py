"""Small models of ours, and the same weights in transformers."""

from math import prod

import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from trainer.engine.models import models
from trainer.engine.parallel.materialize import materialize
from trainer.kernels.choose import choose
from trainer.kernels.cross_entropy.reference import linear_cross_entropy
from trainer.model_zoo.llama3.config import Llama3Config

FLAVORS = [(family, flavor) for family in models for flavor in models[family].flavors]
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
    """Return a Llama whose weights are large enough for every part to matter."""
    config = Llama3Config.model_validate(SIZES | {"init_std": 0.2, "norm_eps": 1e-5} | changes)
    return built(config, attention)


def built(config, attention="auto"):
    """Return the model of a config, with random weights in its norms too."""
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
    return filled(theirs, ours)


def twin(ours):
    """Return the model that transformers makes of our config.json, with the weights of ours."""
    settings = ours.config.hf_config()
    config = AutoConfig.for_model(**settings, attn_implementation="eager")
    theirs = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    assert [type(theirs).__name__] == settings["architectures"]
    return filled(theirs, ours)


def filled(theirs, ours):
    """Return transformers' model with the weights of ours."""
    config = ours.config
    weights = {
        config.layout.to_hf(name): as_theirs(config, name, value)
        for name, value in ours.state_dict().items()
    }
    missing, unexpected = theirs.load_state_dict(weights, strict=False)
    assert not unexpected
    assert missing == (["lm_head.weight"] if config.tie_embeddings else [])
    return theirs.eval()


def flops_of(model, tokens):
    """Return how many operations torch counts in a forward and backward pass, by token."""
    grouped = {
        torch.ops.trainer.grouped_mm: lambda x, *_, out_shape, **__: 2 * prod(x) * out_shape[-1],
        torch.ops.trainer.grouped_dw: lambda dy, x, *_, **__: 2 * prod(dy) * x[-1],
    }
    with FlopCounterMode(display=False, custom_mapping=grouped) as counter:
        model(tokens, labels=tokens, loss=linear_cross_entropy).backward()
    return counter.get_total_flops() / tokens.numel()


def as_theirs(config, name, tensor):
    """Return one of our tensors as transformers' model of some families holds it."""
    path = name.partition(".mlp.")[2]
    if config.name in ("llama4", "gpt_oss") and path in ("experts.gate_up", "experts.down"):
        tensor = tensor.mT
    if config.name == "gpt_oss" and path.startswith("experts.gate_up"):
        tensor = torch.stack(tensor.chunk(2, -1), -1).flatten(-2)
    return tensor


def assert_equal(ours, theirs, tokens):
    """Compare logits, the loss where some labels do not count, and every gradient."""
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-5, atol=1e-5)
    labels = torch.cat((tokens[:, 1:], tokens.new_full((len(tokens), 1), -100)), 1)
    labels[0, 5:9] = -100
    loss = ours(tokens, labels=labels, loss=linear_cross_entropy)
    logits = theirs(tokens).logits.flatten(0, 1)
    expected = F.cross_entropy(logits, labels.flatten(), reduction="sum")
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    loss.backward()
    expected.backward()
    gradients = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        gradient = gradients[ours.config.layout.to_hf(name)].grad
        mine = as_theirs(ours.config, name, parameter.grad)
        assert (mine - gradient).norm() < 1e-5 * gradient.norm(), name
