"""What the configs build."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from trainer.model_zoo.decoder import Head
from trainer.model_zoo.language_model import Constant, LanguageModel, Normal
from trainer.model_zoo.layers.dense import GatedMLP


class SignDescentOptimizer(torch.optim.Optimizer):
    """Parameter -= lr * sign(running mean of its gradient)."""

    def __init__(self, groups: Any, lr: float, weight_decay: float, momentum: float) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Take one step."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["mean"] = torch.zeros_like(parameter)
                state["mean"].lerp_(parameter.grad, 1 - group["momentum"])
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(state["mean"].sign(), alpha=-group["lr"])


class PositionWise(LanguageModel):
    """Embedding, feed-forward blocks, head."""

    def __init__(self, config: Any, kernels: Any) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab, config.dim)
        self.layers = nn.ModuleList(
            GatedMLP(config.dim, 2 * config.dim, 1e-5, kernels) for _ in range(config.n_layers)
        )
        self.head = Head(config.dim, config.vocab, 1e-5, kernels)

    def forward(
        self,
        tokens: Tensor,
        *,
        labels: Tensor | None = None,
        loss: Any = None,
        positions: Tensor | None = None,
        document_ids: Tensor | None = None,
        cache: Any = None,
    ) -> Tensor:
        """Return logits, or the summed loss; positions do not see each other."""
        x = self.embed(tokens).to(self.compute_dtype)
        for block in self.layers:
            x = x + block(x)
        return self.head(x, labels, loss)

    def initial_values(self, name: str) -> Normal | Constant:
        """Return the rule by which the parameter `name` starts."""
        return Constant(1.0) if name.endswith("norm.weight") else Normal(0.02)

    def init_buffers(self, device: torch.device) -> None:
        """Do nothing: there are none."""
