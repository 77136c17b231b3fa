"""The count behind MFU is what torch's FlopCounterMode counts, but for the terms named here.

Torch counts attention over all pairs of positions, we count the half that causality leaves (PaLM,
arXiv:2204.02311, appendix B). All else is the same to the last operation.
"""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.model_zoo.peers import our_model
from trainer.engine.lora.apply import add_adapters
from trainer.engine.lora.sizes import flops_per_token
from trainer.engine.lora.tables import LoRA
from trainer.kernels.choose import choose

LOSS = choose({}, "cpu", 16).linear_cross_entropy
SIZES = {
    "plain": {},
    "tied": {"tie_embeddings": True},
    "wide heads": {"head_dim": 20},
    "one group": {"n_kv_heads": 1},
    "no groups": {"n_kv_heads": 4},
    "deeper": {"n_layers": 5, "dim": 64, "ffn_dim": 80, "vocab_size": 128},
}
ROWS = 2


def counted(model, seq_len):
    """Return torch's count of forward and backward."""
    x = torch.randint(0, 61, (ROWS, seq_len + 1), generator=torch.Generator().manual_seed(1))
    counter = FlopCounterMode(display=False)
    with counter:
        model(x[:, :-1], labels=x[:, 1:], loss=LOSS).backward()
    return counter.get_total_flops()


def attention(config, seq_len):
    """Return what a block's attention costs a token by torch's count: 4 forward, 8 backward."""
    return 12 * config.n_heads * config.head_width * seq_len


@pytest.mark.parametrize("seq_len", [16, 64])
@pytest.mark.parametrize("sizes", SIZES)
def test_a_step_costs_what_torch_counts(sizes, seq_len):
    model = our_model(attention="matmul", **SIZES[sizes])
    config = model.config
    half = config.n_layers * attention(config, seq_len) / 2
    expected = flops_per_token(model, config, seq_len) + half
    assert counted(model, seq_len) == ROWS * seq_len * expected


@pytest.mark.parametrize("sizes", SIZES)
def test_frozen_weights_have_no_gradient_of_their_own(sizes):
    model, seq_len = our_model(**SIZES[sizes]), 32
    config = model.config
    add_adapters(model, config.layout, LoRA(rank=3))
    readers = [getattr(model.layers[0].attention, name) for name in "qkv"]
    # What the first block reads needs no gradient.
    unneeded = sum(2 * (each.weight.numel() + each.lora_a.numel()) for each in readers)
    half = config.n_layers * attention(config, seq_len) / 2
    expected = flops_per_token(model, config, seq_len) + half - unneeded
    assert counted(model, seq_len) == ROWS * seq_len * expected
    assert flops_per_token(model, config, seq_len) < config.flops_per_token(seq_len)


def test_blocks_before_the_first_adapter_have_no_backward_pass():
    model, seq_len = our_model(n_layers=4), 32
    config = model.config
    add_adapters(model, config.layout, LoRA(rank=3, targets=["layers.[23].mlp.down.weight"]))
    first = model.layers[2]
    frozen = [getattr(first.attention, name) for name in "qkvo"] + [first.mlp.gate, first.mlp.up]
    unneeded = sum(2 * each.weight.numel() for each in frozen)
    unneeded += 2 * (first.mlp.down.weight.numel() + first.mlp.down.lora_a.numel())
    unneeded += attention(config, seq_len) / 2 * 2 / 3
    # Half of attention is not in our count: of two blocks all of it, of two the forward pass.
    half = attention(config, seq_len) / 2 * (1 + 1 / 3 + 1 / 3 + 1 / 3)
    expected = flops_per_token(model, config, seq_len) - unneeded + half
    assert counted(model, seq_len) == pytest.approx(ROWS * seq_len * expected, rel=1e-12)
