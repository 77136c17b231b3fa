"""Clients that hold some experts of each layer: stacked tensors are split into one an expert.

A client routes its tokens to its own experts alone. The others keep their global values, whatever
its optimizer does, and do not travel. An expert is averaged over the clients that held it, each
with the tokens that it routed there as weight.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil

import numpy as np
import torch
from torch import Tensor, nn

from ....model_zoo.layers.moe import moe_layers
from ...core.errors import Problem, RecipeError
from ...train.balance import ROUTER, Balance
from .tables import ExpertSubsets

KEY = 2**42
"""of the generator that draws assignments, beside the seed"""


def assign_experts(
    table: ExpertSubsets, experts: int, places: Sequence[int], clients: int, seed: int, number: int
) -> dict[int, list[int]]:
    """Return the experts of each client, ascending: a window of a circle, or of a shuffled one.

    Windows begin at equal distances, so that every expert has a client if all train.

    Args:
        table: the recipe's `[federation.experts]`.
        experts: experts of a layer.
        places: numbers of the clients of the round, ascending.
        clients: number of all clients.
        seed: the recipe's `run.seed`.
        number: number of the round, counted from 1.
    """
    order, count = np.arange(experts), clients
    if table.assignment == "random":
        random = np.random.Generator(np.random.Philox(key=[seed, KEY + number]))
        order, count = random.permutation(experts), len(places)
    size = min(experts, ceil(experts * table.overlap / count))
    found = {}
    for index, client in enumerate(places):
        start = (client if table.assignment == "fixed" else index) * experts // count
        found[client] = sorted(order[(start + np.arange(size)) % experts].tolist())
    return found


def split_experts(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors by name, with `NAME.E` for expert E in the place of each stacked one.

    What is returned shares the memory of the tensors: nothing has to be put together again.

    Args:
        model: the model, whole on this rank.
        tensors: weights or saved buffers of the model, by name.
    """
    stacked = find_stacked(model)
    split: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        parts = {f"{name}.{index}": part for index, part in enumerate(tensor.detach())}
        split |= parts if name in stacked else {name: tensor}
    return split


def find_stacked(model: nn.Module) -> dict[str, str]:
    """Return the name of the layer of each tensor that has a row for each expert, by name."""
    found = {}
    for layer, module in moe_layers(model).items():
        for name, _ in module.experts.named_parameters():
            found[f"{layer}.experts.{name}"] = layer
        found[f"{layer}.router.bias"] = layer
    return found


class HeldExperts:
    """Lets clients train with their own experts, and counts the tokens of each.

    Args:
        table: the recipe's `[federation.experts]`.
        model: the model.
        balance: has the loads of the experts after each step.
        clients: number of all clients.
        seed: the recipe's `run.seed`.

    Raises:
        RecipeError: the model has no experts, or a client would hold too few.
    """

    def __init__(
        self, table: ExpertSubsets, model: nn.Module, balance: Balance, clients: int, seed: int
    ) -> None:
        self._table = table
        self._layers = moe_layers(model)
        self._balance = balance
        self._clients = clients
        self._seed = seed
        self._stacked = find_stacked(model)
        self._assigned: dict[int, list[int]] = {}
        self._tokens: dict[str, Tensor] = {}
        self._held: list[int] = []
        if not self._layers:
            message = f"the model has no experts to assign ({table.assignment})"
            raise RecipeError([Problem(message, "federation.experts.assignment")])
        self.num_experts = max(each.settings.num_experts for each in self._layers.values())

    def begin_round(self, number: int, chosen: Sequence[int]) -> None:
        """Assign experts to the clients of a round.

        Raises:
            RecipeError: a client would hold fewer experts than a token takes.
        """
        self._assigned = assign_experts(
            self._table, self.num_experts, chosen, self._clients, self._seed, number
        )
        needed = max(each.settings.experts_per_token for each in self._layers.values())
        fewest = min((len(each) for each in self._assigned.values()), default=needed)
        if fewest < needed:
            message = f"a client holds {fewest} experts, and a token takes {needed}"
            hint = f"at least {needed * self._clients / self.num_experts:g}"
            raise RecipeError([Problem(message, "federation.experts.overlap", hint=hint)])

    def begin(self, client: int) -> None:
        """Let the routers choose among a client's experts."""
        self._held, self._tokens = self._assigned[client], {}
        for layer in self._layers.values():
            held = torch.zeros(layer.settings.num_experts, dtype=torch.bool)
            held[self._held] = True
            layer.router.held = held.to(layer.load_counter.device)

    @torch.no_grad()
    def after_step(self, model: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
        """Count the tokens of a step, and give the experts that are not held their global values.

        Args:
            model: the split tensors of the model.
            weights: the global ones.
        """
        for router, load in self._balance.loads().items():
            layer = router.removesuffix(ROUTER)
            self._tokens[layer] = self._tokens.get(layer, torch.zeros_like(load)) + load
        # Weight decay and momentum move weights without gradients too.
        for name in self.not_held():
            if name in model:
                model[name].copy_(weights[name])

    @property
    def tokens(self) -> dict[str, Tensor]:
        """The tokens that a client has routed to each expert in its round, [E], by layer."""
        return self._tokens

    def take_tokens(self, tokens: dict[str, Tensor]) -> None:
        """Take the tokens that another process has counted."""
        self._tokens = tokens

    def end(self) -> dict[str, float]:
        """Let the routers choose among all; return the tokens of each held tensor, by name."""
        for layer in self._layers.values():
            layer.router.held = None
        return {
            f"{name}.{expert}": float(self._tokens[layer][expert])
            for name, layer in self._stacked.items()
            for expert in self._held
        }

    def not_held(self) -> list[str]:
        """Return the names of the tensors that the client does not hold."""
        others = [each for each in range(self.num_experts) if each not in self._held]
        return [f"{name}.{expert}" for name in self._stacked for expert in others]

    def share_of(self, name: str) -> float:
        """Return the share of a weight that the client holds."""
        return len(self._held) / self.num_experts if name in self._stacked else 1.0

    def rows_of(self, tokens: Mapping[str, float], name: str) -> Tensor | None:
        """Return the weight of each expert of a stacked tensor, [E]; None: it is not stacked."""
        if name not in self._stacked:
            return None
        places = range(self.num_experts)
        return torch.tensor([tokens.get(f"{name}.{expert}", 0.0) for expert in places])
