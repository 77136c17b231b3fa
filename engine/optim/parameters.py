"""Groups of parameters chosen by name, and optimizer steps without the costs of the compiler and of
DTensor.

`torch.optim` imports the compiler to switch it off around its own methods, and so doubles the time
that an eager run takes to its first step. Nothing here compiles an optimizer, so there is nothing
to switch off.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import (
    ASGD,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
)

from ..core.errors import Problem, RecipeError, nearest
from ..core.local import SCALE, distribute_like, is_split, local
from ..core.text.expressions import match_names
from .elementwise.base import ElementwiseOptimizer
from .placement import OWNED, ParameterPlacement
from .tables import OptimizerConfig


def parameter_groups(
    parameters: Iterable[tuple[str, Parameter]],
    config: OptimizerConfig,
    remote: Iterable[str] = (),
    placements: Mapping[str, ParameterPlacement] | None = None,
) -> list[dict[str, Any]]:
    """Return torch parameter groups: one a `[[optimizer.groups]]` entry, and one for the rest.

    Frozen parameters are in none, and a pattern may match nothing else. Each group holds `params`,
    its peak rate as `lr` and `peak_lr`, and the entry's other values. A group without parameters
    on this rank is left out. For an optimizer of matrices there is a group of matrices and one of
    other parameters in the place of each; it also holds `is_matrix` and `placements`.

    Args:
        parameters: this rank's, by name.
        config: the recipe's `[optimizer]`.
        remote: names of the parameters that only other stages of a pipeline hold.
        placements: the placement of each parameter, where `config.needs_matrices`.

    Raises:
        RecipeError: patterns that match no parameter of the whole model, or none that an earlier
            one left.
    """
    parameters = list(parameters)
    frozen = [name for name, weight in parameters if not weight.requires_grad]
    parameters = [(name, weight) for name, weight in parameters if weight.requires_grad]
    tests = [match_names(group.match) for group in config.groups]

    def find_group(name: str) -> int:
        return next((i for i, matches in enumerate(tests) if matches(name)), len(tests))

    # All ranks must agree whether a pattern is wrong, so that all of them end.
    names = [*(name for name, _ in parameters), *remote] if tests else []
    matched = set(map(find_group, names))
    problems = []
    for index, group in enumerate(config.groups):
        if index not in matched and not any(map(tests[index], frozen)):
            problems.append(_unmatched(index, group.match, names))
    if problems:
        raise RecipeError(problems)
    given = placements if config.needs_matrices and placements is not None else {}
    members = defaultdict[tuple[int, bool], list[tuple[str, Parameter]]](list)
    for name, weight in parameters:
        is_matrix = name in given and given[name].is_matrix
        members[find_group(name), is_matrix].append((name, weight))
    groups = []
    for index, is_matrix in sorted(members):
        rates = config.rates_of(is_matrix=is_matrix or not given)
        entry = config.groups[index].overrides(rates) if index < len(tests) else {}
        lr = entry.get("lr", rates.lr)
        # The schedule sets `lr` of a group before each step, as a factor of `peak_lr`.
        found = {"lr": lr, **entry, "peak_lr": lr}
        found["params"] = [weight for _, weight in members[index, is_matrix]]
        if given:
            found["placements"] = [given[name] for name, _ in members[index, is_matrix]]
            found["is_matrix"] = is_matrix
        groups.append(found)
    return groups


def _unmatched(index: int, pattern: str, names: list[str]) -> Problem:
    hint = nearest(pattern, names) or f"parameters are named like {names[0]} and {names[-1]}"
    matched_before = any(map(match_names(pattern), names))
    reason = "only parameters that earlier groups took" if matched_before else "no parameter"
    return Problem(
        f'"{pattern}" matches {reason}', key=f"optimizer.groups.{index}.match", hint=hint
    )


# Optimizers such as Muon, which a plugin may add, need whole parameters instead.
ELEMENTWISE = (
    ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop, Rprop,
)  # fmt: skip
"""torch's optimizers that update each element of a parameter without looking at the others"""


def skips_on_device(optimizer: Optimizer, device: torch.device) -> bool:
    """Return whether a step leaves weights and state as they are where `found_inf` is 1.

    Torch's fused Adam and AdamW do, without a wait for the device (torch 2.13); the other fused
    ones cannot update shards, and optimizers over lists of tensors do not look at it.

    Args:
        optimizer: any optimizer.
        device: where `found_inf` is; a copy to weights in CPU memory would be a wait.
    """
    return type(optimizer) in (Adam, AdamW) and all(
        group["fused"] and all(weight.device.type == device.type for weight in group["params"])
        for group in optimizer.param_groups
    )


def avoid_dynamo_import() -> None:
    """Let optimizers be built without importing the compiler; call it before the first one is."""
    for method in (Optimizer.add_param_group, Optimizer.zero_grad):
        # What torch._disable_dynamo asks for before it imports: the function to call instead.
        original = inspect.unwrap(method)
        if original is not method:
            original.__dict__.setdefault("__dynamo_disable", original)


def undecorated_step(optimizer: Optimizer) -> Callable[[], None]:
    """Return the optimizer's step free of its decorators (compiler, profiler, hooks).

    An optimizer of `ELEMENTWISE`, or an `ElementwiseOptimizer`, sees the local shards of DTensors.
    DTensor would search for a sharding of each of its operations: 12 seconds in the first step on a
    mesh of three axes (torch 2.13, 21 parameters), and a dispatch in Python in every step.
    """
    step = inspect.unwrap(type(optimizer).step)
    # Of torch's the exact type: a subclass may look at whole parameters.
    is_elementwise = type(optimizer) in ELEMENTWISE or (
        isinstance(optimizer, ElementwiseOptimizer) and optimizer.takes_shards
    )
    shards = local_shards if is_elementwise else nullcontext

    def without_gradients() -> None:
        # One of the decorators that are gone switches gradients off.
        with torch.no_grad(), shards(optimizer):
            step(optimizer)

    return without_gradients


@contextmanager
def local_shards(optimizer: Optimizer) -> Iterator[None]:
    """Replace DTensors by this rank's shards in an optimizer's groups, gradients and state.

    Shards share the memory of their DTensors. State that the optimizer makes meanwhile becomes
    DTensors laid out like their parameters when the context ends.
    """
    weights = [group["params"] for group in optimizer.param_groups]
    if not any(is_split(weight) for group in weights for weight in group):
        yield
        return
    state, optimizer.state = optimizer.state, defaultdict(dict)
    pairs: list[tuple[Tensor, Tensor]] = []
    for group in optimizer.param_groups:
        # Another tensor on the same memory: the gradient set on it must not outlive the step.
        shards = [local(weight).detach() for weight in group["params"]]
        for weight, shard in zip(group["params"], shards, strict=True):
            shard.grad = None if weight.grad is None else local(weight.grad)
            if weight in state:
                optimizer.state[shard] = {
                    key: local(value) if isinstance(value, Tensor) else value
                    for key, value in state[weight].items()
                }
            pairs.append((weight, shard))
        group["params"] = shards
    try:
        yield
    finally:
        for group, members in zip(optimizer.param_groups, weights, strict=True):
            group["params"] = members
        made, optimizer.state = optimizer.state, state
        for weight, shard in pairs:
            for key, value in made.get(shard, {}).items():
                known = state[weight].get(key)
                # A tensor that was there before was updated in place, in the DTensor's memory.
                if not isinstance(value, Tensor) or not isinstance(known, Tensor):
                    state[weight][key] = _distribute_state(weight, shard, key, value)


def _distribute_state(weight: Tensor, shard: Tensor, key: str, value: Any) -> Any:
    if not (is_split(weight) and isinstance(value, Tensor)) or OWNED in key:
        return value
    if value.shape == shard.shape:
        return distribute_like(weight, value, weight.shape)
    if key.endswith(SCALE):
        block = shard.shape[-1] // value.shape[-1]
        return distribute_like(weight, value, (*weight.shape[:-1], weight.shape[-1] // block))
    return value
