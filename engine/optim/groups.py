"""Parameter groups chosen by name."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from fnmatch import translate
from typing import TYPE_CHECKING, Any

from ..core.errors import Problem, RecipeError, nearest
from ..core.text.expressions import compile_expression
from .tables import OptimizerConfig

if TYPE_CHECKING:
    from torch.nn import Parameter


def matcher(pattern: str) -> Callable[[str], bool]:
    """Return a test of parameter names: a glob, or `re:` and a regular expression (searched)."""
    if pattern.startswith("re:"):
        expression = compile_expression(pattern[3:])
        return lambda name: expression.search(name) is not None
    glob = re.compile(translate(pattern))
    return lambda name: glob.match(name) is not None


def parameter_groups(
    parameters: Iterable[tuple[str, Parameter]], config: OptimizerConfig
) -> list[dict[str, Any]]:
    """Return torch parameter groups: one a `[[optimizer.groups]]` entry, and one for the rest.

    Frozen parameters are in none, and a pattern may match nothing else. Each group holds `params`,
    its peak rate as `lr` and `peak_lr`, and the entry's other values.

    Raises:
        RecipeError: patterns that match no parameter, or none that an earlier one left.
    """
    parameters = list(parameters)
    frozen = [name for name, weight in parameters if not weight.requires_grad]
    parameters = [(name, weight) for name, weight in parameters if weight.requires_grad]
    tests = [matcher(group.match) for group in config.groups]
    members: list[list[Parameter]] = [[] for _ in range(len(tests) + 1)]
    for name, weight in parameters:
        first = next((i for i, matches in enumerate(tests) if matches(name)), len(tests))
        members[first].append(weight)
    problems = []
    for index, group in enumerate(config.groups):
        if not members[index] and not any(map(tests[index], frozen)):
            problems.append(_unmatched(index, group.match, [name for name, _ in parameters]))
    if problems:
        raise RecipeError(problems)
    overrides = [*(group.overrides() for group in config.groups), {}]
    return [
        {"params": weights, "lr": config.lr, **values, "peak_lr": values.get("lr", config.lr)}
        for weights, values in zip(members, overrides, strict=True)
        if weights
    ]


def _unmatched(index: int, pattern: str, names: list[str]) -> Problem:
    hint = nearest(pattern, names) or f"parameters are named like {names[0]} and {names[-1]}"
    matched_before = any(map(matcher(pattern), names))
    reason = "only parameters that earlier groups took" if matched_before else "no parameter"
    return Problem(
        f'"{pattern}" matches {reason}', key=f"optimizer.groups.{index}.match", hint=hint
    )
