"""Small models of ours, and the same weights in transformers.

Modules that ranks import as well import transformers in functions: it takes two seconds of each.
"""

from math import prod

import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from trainer.engine.core.registry import models
from trainer.engine.parallel.materialize import materialize, without_storage
from trainer.kernels.choose import choose
from trainer.kernels.cross_entropy.reference import linear_cross_entropy
from trainer.model_zoo.language_model import KVCache
from trainer.model_zoo.llama3.config import Llama3Config

FLAVORS = [(family, flavor) for family in models for flavor in models[family].flavors]
SIZES = {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 48, "vocab_size": 61}
VOCAB = SIZES["vocab_size"]
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


def tokens(batch=2, length=33):
    return torch.randint(0, VOCAB, (batch, length), generator=torch.Generator().manual_seed(0))


def some_labels(x):
    """Return what follows each token; some do not count."""
    labels = F.pad(x[:, 1:], (0, 1), value=-100)
    labels[0, 5:9] = -100
    return labels


def documents(lengths):
    """Return positions and document ids of a row."""
    positions = torch.cat([torch.arange(n) for n in lengths]).unsqueeze(0)
    ids = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)]).unsqueeze(0).int()
    return positions, ids


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
    from transformers import LlamaConfig, LlamaForCausalLM

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
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = ours.config.hf_config()
    config = AutoConfig.for_model(**settings, attn_implementation="eager")
    theirs = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    assert [type(theirs).__name__] == settings["architectures"]
    return filled(theirs, ours)


def filled(theirs, ours):
    """Return transformers' model with the weights of ours but for blocks that predict farther."""
    config = ours.config
    farther = tuple(f"layers.{number}." for number in range(config.n_layers, config.num_blocks))
    state = {n: value for n, value in ours.state_dict().items() if not n.startswith(farther)}
    missing, unexpected = theirs.load_state_dict(in_their_words(config, state), strict=False)
    assert not unexpected
    assert missing == (["lm_head.weight"] if config.tie_embeddings else [])
    return theirs.eval()


def num_parameters(config):
    """Return how many parameters the model of a config has."""
    with without_storage():
        model = config.build(choose({}, "cuda", 8192))
    return sum(p.numel() for p in model.parameters())


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
    if path.startswith("experts.gate_up"):
        if config.name == "gpt_oss":
            tensor = torch.stack(tensor.unbind(1), 2)
        tensor = tensor.flatten(1, 2)
    if config.name in ("llama4", "gpt_oss") and path in ("experts.gate_up", "experts.down"):
        tensor = tensor.mT
    return tensor


def in_their_words(config, values):
    """Return {their name: their tensor} of {our name: our tensor}."""
    found = {}
    for ours, value in values.items():
        name, tensor = config.layout.to_hf(ours), as_theirs(config, ours, value)
        # One tensor of theirs may hold the rows of several of ours, in the module's order.
        found[name] = torch.cat((found[name], tensor)) if name in found else tensor
    return found


def assert_equal(ours, theirs, tokens):
    """Compare logits, the loss where some labels do not count, and every gradient."""
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-5, atol=1e-5)
    labels = some_labels(tokens)
    loss = ours(tokens, labels=labels, loss=linear_cross_entropy)
    logits = theirs(tokens).logits.flatten(0, 1)
    expected = F.cross_entropy(logits, labels.flatten(), reduction="sum")
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    loss.backward()
    expected.backward()
    gradients = {name: parameter.grad for name, parameter in ours.named_parameters()}
    found, wanted = in_their_words(ours.config, gradients), dict(theirs.named_parameters())
    assert found.keys() == wanted.keys()
    for name, parameter in wanted.items():
        assert (found[name] - parameter.grad).norm() < 1e-5 * parameter.grad.norm(), name


def assert_cache_changes_nothing(model, pieces, tokens, **columns):
    """Compare the logits of rows that come in pieces, with a cache, with those of whole rows."""
    columns, cache = {"tokens": tokens, **columns}, KVCache(tokens.shape[1])
    parts = zip(*(column.split(pieces, dim=1) for column in columns.values()), strict=True)
    with torch.no_grad():
        steps = [model(**dict(zip(columns, part, strict=True)), cache=cache) for part in parts]
        torch.testing.assert_close(torch.cat(steps, 1), model(**columns), rtol=1e-5, atol=1e-5)


def assert_documents_are_as_if_alone(model, lengths):
    """Compare the logits of documents in one row with those of each by itself."""
    row = tokens(1, sum(lengths))
    positions, ids = documents(lengths)
    together = model(row, positions=positions, document_ids=ids)
    apart = torch.cat([model(part) for part in row.split(lengths, dim=1)], dim=1)
    torch.testing.assert_close(together, apart, rtol=1e-5, atol=1e-5)


def reach(model):
    """Return the positions whose hidden states position 20 depends on."""
    hidden = torch.randn(1, 21, model.config.dim, requires_grad=True)
    blocks = range(model.config.n_layers)
    out = model(None, hidden=hidden, positions=torch.arange(21), blocks=blocks)
    out[0, 20].sum().backward()
    return hidden.grad[0].abs().sum(-1).nonzero().flatten().tolist()
