"""What torch.compile makes of a recipe's model: graphs, and where they break."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from warnings import catch_warnings

import torch
from torch._dynamo.utils import counters, graph_break_reasons

from ...kernels.cross_entropy import op as compiled_loss
from ..estimate.simulate.build import empty_batches, rows_of, simulate_rank
from ..estimate.simulate.torch_internals import replace_attribute
from ..recipe.schema import Recipe


@dataclass(frozen=True)
class Break:
    """Where a graph ends before its function does.

    Attributes:
        reason: in torch's words.
        place: file and line; empty where torch does not say.
    """

    reason: str
    place: str


@dataclass
class Traced:
    """What became of one function that a run compiles.

    Attributes:
        part: the block's name, or "loss".
        like_it: others that use the same graphs.
        graphs: for rows of the recipe's length; one if nothing breaks.
        operations: in them.
        recompiled: further graphs for rows of another length.
        used: numbers of the graphs that it ran.
        breaks: each once.
    """

    part: str
    like_it: int = 0
    graphs: int = 0
    operations: int = 0
    recompiled: int = 0
    used: tuple[int, ...] = ()
    breaks: list[Break] = field(default_factory=list)


def trace(recipe: Recipe, ranks: int, vocab_size: int) -> list[Traced]:
    """Trace what a run would compile, on tensors without content, and return each distinct part.

    With a pipeline these are the blocks of the last stage.

    Args:
        recipe: validated for that many ranks; what it says of `compile.enabled` does not matter.
        ranks: of the run.
        vocab_size: of the tokenizer.
    """
    recipe = recipe.model_copy(
        update={"compile": recipe.compile.model_copy(update={"enabled": True})}
    )
    tracer = _Tracer(recipe.model.layout.blocks)
    counters.clear()
    with (
        tracer.watching(),
        simulate_rank(recipe, ranks - 1, ranks, vocab_size, compiles=True) as (_, step, plan),
    ):
        _, rows = rows_of(recipe.data, step)
        for length in _lengths(recipe, 2 * plan.degrees.sequence):
            data = recipe.data.model_copy(update={"seq_len": length})
            (batch,) = empty_batches(data, rows, rows)
            step.accumulate([plan.take(batch, step.parallel_model.model)], lr_factor=1.0)
            step.clear()
            if step.parallel_model.pipeline:  # whose stages know one length
                break
            tracer.is_other_length = True
    return tracer.distinct()


def _lengths(recipe: Recipe, unit: int) -> Iterator[int]:
    full = recipe.data.seq_len
    yield full
    if half := full // 2 // unit * unit:
        yield half


class _Tracer:
    """Stands in for torch.compile, and counts what each function becomes."""

    def __init__(self, blocks: str) -> None:
        self._blocks = blocks
        self._parts: list[Traced] = []
        self._made: list[int] = []
        self._ran: list[int] = []
        self._graphs = 0
        self.is_other_length = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Compile with this in place of torch.compile."""
        compiled_loss.compiled_inner.cache_clear()
        stand_in = self._compile_with(torch.compile)
        # What torch warns of when a graph breaks is in our own words already.
        with catch_warnings(action="ignore"), replace_attribute(torch, "compile", stand_in):
            yield
        compiled_loss.compiled_inner.cache_clear()

    def _compile_with(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def compile_(function: Callable[..., Any], **_: Any) -> Callable[..., Any]:
            is_loss = function is compiled_loss.fusible_replace_by_gradient
            part = Traced("loss" if is_loss else f"{self._blocks}.{len(self._parts)}")
            self._parts.append(part)
            compiled = original(function, backend=self._count)

            def watched(*args: Any, **kwargs: Any) -> Any:
                self._made.clear()
                self._ran.clear()
                graph_break_reasons.clear()
                messages = {*counters["graph_break"]}
                out = compiled(*args, **kwargs)
                self._note(part, {*counters["graph_break"]} - messages)
                return out

            return watched

        return compile_

    def _count(self, graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        calls = [node for node in graph.graph.nodes if node.op.startswith("call_")]
        self._made.append(len(calls))
        self._graphs += 1
        number = self._graphs

        def run(*args: Any) -> Any:
            self._ran.append(number)
            return graph.forward(*args)

        return run

    def _note(self, part: Traced, messages: set[str]) -> None:
        if self.is_other_length:
            part.recompiled += len(self._made)
        else:
            part.graphs += len(self._made)
            part.operations += sum(self._made)
            part.used = part.used or tuple(self._ran)
        breaks = [_break(each.reason, each.user_stack) for each in graph_break_reasons]
        reasons = {each.reason for each in breaks}
        others = [_break(text, []) for text in messages]  # torch does not say where
        breaks += [each for each in others if each.reason not in reasons]
        part.breaks += [each for each in dict.fromkeys(breaks) if each not in part.breaks]

    def distinct(self) -> list[Traced]:
        """Return the parts that made graphs or broke."""
        parts = [part for part in self._parts if part.graphs or part.breaks]
        for part in self._parts:
            for other in parts:
                other.like_it += part is not other and part.used == other.used != ()
        return parts


def _break(reason: str, stack: list[Any]) -> Break:
    place = f"{stack[-1].filename}:{stack[-1].lineno}" if stack else ""
    return Break(" ".join(reason.strip().splitlines()[0].split()), place)
