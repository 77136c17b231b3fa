"""What is timed: an operation on some sizes, and who does it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Inputs = tuple[Any, ...]


@dataclass(frozen=True)
class Case:
    """One operation on inputs of one size."""

    operation: str
    shape: str
    inputs: Callable[[int], Inputs]
    """seed -> tensors of random numbers, never zeros: those take less power, and so less time"""
    baselines: dict[str, Callable[..., Any]]
    exact: Callable[..., Tensor]
    """inputs -> what is right, in float64; of a large result its first rows alone"""
    routing: str = ""
    flops: float = 0
    bytes: float = 0
    """read and written where nothing is read twice"""
    sizes: dict[str, int] = field(default_factory=dict)
    exact_dense: Callable[..., Tensor] | None = None
    """what is right for the baseline "dense"; left out: what is for all"""
    bound: str = "dense_tflops"
    """what products are a share of where no baseline is called "dense" """

    def error(self, baseline: str, found: Any, inputs: Inputs) -> float:
        """Return the relative error of a result against float64."""
        exact_of = self.exact_dense if baseline == "dense" and self.exact_dense else self.exact
        exact = exact_of(*inputs).detach()
        value = found[0] if isinstance(found, tuple) else found
        value = value.detach()[: len(exact)] if exact.dim() else value.detach()
        return float((value.double() - exact).norm() / exact.norm())


def compiled(
    function: Callable[..., Any], device: str, mode: str | None = None
) -> Callable[..., Any]:
    """Return the function as torch.compile makes it; in a dry run, only traced."""
    if device == "cuda":
        return torch.compile(function, mode=mode)
    return torch.compile(function, backend="eager")


def ends(kind: str, rows: int, groups: int, seed: int) -> list[int]:
    """Return where groups end: equal ones, equally likely ones, or a few that get most rows.

    Among the last kind one group in eight gets none.
    """
    generator = torch.Generator().manual_seed(seed)
    if kind == "balanced":
        return [rows * (group + 1) // groups for group in range(groups)]
    likely = torch.ones(groups)
    if kind == "zipf":
        likely = 1 / torch.arange(1, groups + 1).float() ** 1.2
        likely[3::8] = 0
    chosen = torch.multinomial(likely, rows, replacement=True, generator=generator)
    return torch.bincount(chosen, minlength=groups).cumsum(0).tolist()


def choices(kind: str, tokens: int, num_choices: int, experts: int, seed: int) -> Tensor:
    """Return [T, A] choices that fall on experts as `ends` says, in mixed order."""
    rows = tokens * num_choices
    expert = torch.searchsorted(
        torch.tensor(ends(kind, rows, experts, seed)), torch.arange(rows), right=True
    )
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))
    return expert[order].view(tokens, num_choices)


def each_routing() -> Iterator[str]:
    """Yield how rows fall on experts."""
    yield from ("balanced", "multinomial", "zipf")
