"""What a training step costs where most weights are frozen."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from torch import nn

from ...model_zoo.layers.linear import Linear
from .layer import AdaptedLinear

if TYPE_CHECKING:
    from ...model_zoo.config import ModelConfig
    from ...model_zoo.language_model import LanguageModel


def flops_per_token(model: LanguageModel, config: ModelConfig, seq_len: int) -> float:
    """Return floating-point operations a token of one training step, forward and backward.

    Without adapters the model's own count. With them, frozen weights have no gradient of their own
    (4 operations instead of 6), adapters have (6), and blocks before the first one with an adapter
    have no backward pass. That one is counted in full, though what it reads needs no gradient.
    """
    whole, weights = config.flops_per_token(seq_len), config.flops_per_token(0)
    blocks = cast(nn.ModuleList, model.get_submodule(config.layout.blocks))
    adapters = [_adapter_parameters(block) for block in blocks]
    if not any(adapters):
        return whole
    forward_only = next(number for number, count in enumerate(adapters) if count)
    attention = (whole - weights) / len(blocks)
    saved = weights / 3 + attention * 2 / 3 * forward_only
    saved += sum(2.0 * _multiplying(block) for block in blocks[:forward_only])
    return whole - saved + 6.0 * sum(adapters)


def _adapter_parameters(block: nn.Module) -> int:
    found = (module for module in block.modules() if isinstance(module, AdaptedLinear))
    return sum(module.lora_a.numel() + module.lora_b.numel() for module in found)


def _multiplying(block: nn.Module) -> int:
    return sum(each.weight.numel() for each in block.modules() if isinstance(each, Linear))
