"""Adapters beside projections that have a bias, as gpt-oss's attention has."""

import torch

from tests.model_zoo.test_gpt_oss import VOCAB, model_of
from trainer.engine.lora.adapter_weights import merge_adapters
from trainer.engine.lora.apply import add_adapters
from trainer.engine.lora.tables import LoRA
from trainer.model_zoo.layers.dense import AdaptedLinear


def adapt(model):
    add_adapters(model, model.config.layout, LoRA(rank=3, targets=["*.attention.[qkvo].weight"]))
    adapted = [each for each in model.modules() if isinstance(each, AdaptedLinear)]
    assert len(adapted) == 4 * model.config.n_layers
    return adapted


def test_an_adapter_keeps_the_bias_frozen_and_a_merge_keeps_it_too():
    torch.manual_seed(2)
    model = model_of()
    tokens = torch.arange(12).view(1, -1) % VOCAB
    before = model(tokens)
    names = {name for name, _ in model.named_parameters()}
    adapted = adapt(model)
    assert names < {name for name, _ in model.named_parameters()}
    for each in adapted:
        assert not each.bias.requires_grad
        torch.nn.init.normal_(each.lora_a, std=0.1)
        torch.nn.init.zeros_(each.lora_b)
    torch.testing.assert_close(model(tokens), before)
    for each in adapted:
        torch.nn.init.normal_(each.lora_b, std=0.1)
    tuned = model(tokens)
    assert (tuned - before).abs().max() > 0.01
    merge_adapters(model)
    assert {name for name, _ in model.named_parameters()} == names
    torch.testing.assert_close(model(tokens), tuned, atol=1e-4, rtol=1e-4)
