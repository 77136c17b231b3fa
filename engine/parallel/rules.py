"""`[[parallel.rules]]`: which parameters each one decides, and what cannot be. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from ..core.errors import nearest
from ..core.text.display import format_value, make_printable
from ..core.text.expressions import ExpressionError, compile_expression, match_names

if TYPE_CHECKING:
    from ..core.text.positions import KeyPath
    from .tables import Parallel, Rule

Finding = tuple["KeyPath", str, str]
"""key, message, hint"""


def deciding_rules(names: Iterable[str], rules: Sequence[Rule]) -> dict[str, tuple[int, Rule]]:
    """Return the first rule that matches each name, and its index; no entry where none does."""
    tests = [compile_expression(rule.match) for rule in rules]
    found = {}
    for name in names:
        for index, test in enumerate(tests):
            if test.fullmatch(name):
                found[name] = (index, rules[index])
                break
    return found


def deciding_patterns(names: Iterable[str], patterns: Sequence[str]) -> dict[str, str]:
    """Return the first pattern of `fsdp.ignored` that matches each name; no entry where none is."""
    tests = {pattern: match_names(pattern) for pattern in patterns}
    found = {name: next((each for each in tests if tests[each](name)), "") for name in names}
    return {name: pattern for name, pattern in found.items() if pattern}


def select_matching(table: Parallel, names: Iterable[str]) -> Parallel:
    """Return the table without rules and patterns of `fsdp.ignored` that decide none of the names.

    A frozen model has names of its own, and follows what is said of them alone.

    Args:
        table: the recipe's `[parallel]`.
        names: of a model's parameters; empty: they are unknown, and nothing is left out.
    """
    names = list(names)
    if not names:
        return table
    used = {index for index, _ in deciding_rules(names, table.rules).values()}
    rules = [rule for index, rule in enumerate(table.rules) if index in used]
    patterns = deciding_patterns(names, table.fsdp.ignored).values()
    ignored = [pattern for pattern in table.fsdp.ignored if pattern in patterns]
    fsdp = table.fsdp.model_copy(update={"ignored": ignored})
    return table.model_copy(update={"rules": rules, "fsdp": fsdp})


def check_rules(
    shapes: Mapping[str, tuple[int, ...]],
    table: Parallel,
    used_dim: Callable[[str], int | None],
    tensor: int,
    shard: int,
) -> Iterator[Finding]:
    """Yield what is wrong with the rules of a table, and with what FSDP is to ignore.

    Args:
        shapes: the global shape of each parameter by name; empty while they are unknown.
        table: the recipe's `[parallel]`.
        used_dim: returns the dim of a parameter that the ranks of the tensor axis split to compute.
        tensor: the number of ranks of the tensor axis.
        shard: the number of ranks over which FSDP shards; 1 where it does not.
    """
    broken = list(check_expressions(table))
    yield from broken
    yield from _unsharded(table)
    # What follows matches names, which it cannot with an expression that does not compile.
    if broken or not shapes:
        return
    decided = deciding_rules(shapes, table.rules)
    yield from _ignored_patterns(shapes, table.fsdp.ignored, decided)
    for index, rule in enumerate(table.rules):
        path: KeyPath = ("parallel", "rules", index)
        names = [name for name, (number, _) in decided.items() if number == index]
        if not names:
            yield (*path, "match"), *_unmatched(rule, list(shapes))
        for name in names:
            problem = _misplaced(name, shapes[name], rule, used_dim(name), tensor, shard)
            if problem:
                axis, message, hint = problem
                yield (*path, "place", axis), message, hint
                break  # the same layer of other blocks has the same fault


def check_expressions(table: Parallel) -> Iterator[Finding]:
    """Yield the expressions of rules, and of what FSDP is to ignore, that do not compile."""
    given: dict[KeyPath, str] = {
        ("parallel", "rules", index, "match"): rule.match for index, rule in enumerate(table.rules)
    }
    for index, pattern in enumerate(table.fsdp.ignored):
        if pattern.startswith("re:"):
            given["parallel", "fsdp", "ignored", index] = pattern.removeprefix("re:")
    for path, text in given.items():
        try:
            compile_expression(text)
        except ExpressionError as error:
            message = f"{format_value(text)} is no regular expression: {error}"
            yield path, make_printable(message), ""


def _ignored_patterns(
    names: Iterable[str], patterns: Sequence[str], decided: Mapping[str, tuple[int, Rule]]
) -> Iterator[Finding]:
    """Yield patterns of `fsdp.ignored` that match nothing, or what a rule shards."""
    names = list(names)
    for position, pattern in enumerate(patterns):
        path: KeyPath = ("parallel", "fsdp", "ignored", position)
        matched = list(filter(match_names(pattern), names))
        if not matched:
            hint = nearest(pattern, names) or f"parameters are named like {names[0]}"
            yield path, f"{format_value(pattern)} matches no parameter", hint
        for name in matched:
            if name in decided and decided[name][1].place.shard is not None:
                message = f"parallel.rules.{decided[name][0]} shards {name}"
                yield path, message, "leave shard out of the rule, or the pattern here"
                break  # the same layer of other blocks has the same fault


def _unsharded(table: Parallel) -> Iterator[Finding]:
    """Yield rules and patterns that no strategy of FSDP can follow."""
    if table.fsdp.ignored and not table.fsdp.sharding.shards:
        message = f'parallel.fsdp.strategy = "{table.fsdp.strategy}" keeps all weights whole'
        yield ("parallel", "fsdp", "ignored"), message, 'leave it out, or take "full_shard"'
    if table.fsdp.ignored and table.fsdp.offload:
        message = "parallel.fsdp.offload moves pieces, and these weights would be whole"
        yield ("parallel", "fsdp", "ignored"), message, "leave out one of the two"
    for index, rule in enumerate(table.rules):
        path: KeyPath = ("parallel", "rules", index, "place")
        if rule.place.shard is not None and not table.fsdp.sharding.shards:
            message = f'parallel.fsdp.strategy = "{table.fsdp.strategy}" keeps all weights whole'
            yield (*path, "shard"), message, 'leave shard out, or take "full_shard"'
        if rule.place.shard_dim is None and table.fsdp.offload:
            message = "parallel.fsdp.offload moves pieces, and this weight would be whole"
            yield path, message, "give { shard = 0 }, or do not offload"


def _unmatched(rule: Rule, names: list[str]) -> tuple[str, str]:
    matched_before = any(map(compile_expression(rule.match).fullmatch, names))
    reason = "only parameters that earlier rules took" if matched_before else "no parameter"
    # Without escapes the expression reads like a name, for the search of a similar one.
    plain = re.sub(r"\\(.)", r"\1", rule.match)
    hint = nearest(plain, names) or f"parameters are named like {names[0]} and {names[-1]}"
    hint = "put it before them" if matched_before else hint
    return f"{format_value(rule.match)} matches {reason}", hint


def _misplaced(
    name: str, shape: tuple[int, ...], rule: Rule, used: int | None, tensor: int, shard: int
) -> tuple[str, str, str] | None:
    """Return axis, message and hint where a parameter cannot lie as a rule says."""
    by_tensor, by_shard = rule.place.tensor, rule.place.shard_dim
    for axis, dim in (("tensor", by_tensor), ("shard", by_shard)):
        if dim is not None and dim >= len(shape):
            known = " and ".join(map(str, range(len(shape))))
            return axis, f"{name} has no dim {dim}", f"its dims: {known}"
    # A layer computes with its shard of the dim `used` as it is, even or not, such as a vocabulary.
    # Shards of another dim are all-gathered first, which needs equal ones.
    if by_tensor is not None and by_tensor != used and shape[by_tensor] % tensor:
        return "tensor", *_uneven(name, by_tensor, shape, tensor, used)
    # FSDP shards what the tensor axis has left of a dim.
    local = [size // tensor if dim == by_tensor else size for dim, size in enumerate(shape)]
    if by_shard and local[by_shard] % shard:  # FSDP2 pads dim 0, and no other
        return "shard", *_uneven(name, by_shard, local, shard, 0)
    return None


def _uneven(
    name: str, dim: int, sizes: Sequence[int], ranks: int, always: int | None
) -> tuple[str, str]:
    """Return message and hint for a dim that ranks cannot share; `always` is one they can."""
    works = [each for each, size in enumerate(sizes) if each == always or size % ranks == 0]
    degrees = [number for number in range(1, 2 * ranks) if sizes[dim] % number == 0]
    degree = min(degrees, key=lambda number: abs(number - ranks))
    message = f"{ranks} ranks cannot share dim {dim} of {name}, {sizes[dim]} wide, evenly"
    hint = f"nearest number of ranks that works: {degree}"
    return message, f"dim {works[0]} works; {hint}" if works else hint
