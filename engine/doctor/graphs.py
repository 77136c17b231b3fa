"""Traces a recipe's model with torch.compile and reports its graphs and graph breaks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from inspect import unwrap
from typing import Any
from warnings import catch_warnings

import torch
from torch import nn

from ...kernels.cross_entropy import op as compiled_loss
from ...kernels.torch_private import dynamo_counters, graph_break_reasons
from ..estimate.simulate.build import empty_batches, samples_of, simulate_rank
from ..estimate.simulate.torch_internals import replace_attribute
from ..recipe.schema import Recipe


@dataclass(frozen=True)
class Break:
    """A graph break.

    Attributes:
        reason: torch's message.
        place: file and line of the user code; empty if torch does not give them.
    """

    reason: str
    place: str


@dataclass
class Traced:
    """The graphs of one function that a run compiles.

    Attributes:
        part: the name of the block or of a region of it, or "loss".
        like_it: the number of other functions that use the same graphs.
        graphs: the number of graphs for the recipe's sequence length; 1 without graph breaks.
        operations: the number of operations in these graphs.
        recompiled: the number of further graphs for another sequence length.
        used: the ids of the graphs that the first call ran.
        breaks: the distinct graph breaks.
    """

    part: str
    like_it: int = 0
    graphs: int = 0
    operations: int = 0
    recompiled: int = 0
    used: tuple[int, ...] = ()
    breaks: list[Break] = field(default_factory=list)


def trace(recipe: Recipe, ranks: int, vocab_size: int) -> list[Traced]:
    """Trace the functions that a run would compile, on fake tensors, and return the distinct ones.

    The last rank is traced; with a pipeline it holds the blocks of the last stage.

    Args:
        recipe: a recipe validated for that many ranks; `compile.enabled` is ignored.
        ranks: the world size.
        vocab_size: the vocabulary size of the tokenizer.
    """
    recipe = recipe.for_largest_split().model_copy(
        update={"compile": recipe.compile.model_copy(update={"enabled": True})}
    )
    tracer = _Tracer(recipe.model.layout.blocks or "model")
    dynamo_counters.clear()
    # Dynamo reads the GPU's random state, and recomputation refuses a GPU that is first used
    # inside a block.
    if torch.cuda.is_available():
        torch.cuda.init()  # type: ignore[no-untyped-call]  # torch gives it no types
    with (
        tracer.watching(),
        simulate_rank(recipe, ranks - 1, ranks, vocab_size, compiles=True) as (_, step, plan),
    ):
        tracer.name_parts(step.parallel_model.model)
        _, size = samples_of(recipe.data, step)
        for length in _lengths(recipe, 2 * plan.degrees.sequence):
            data = recipe.data.model_copy(update={"seq_len": length})
            (batch,) = empty_batches(replace(step.task, data=data), size, size)
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
    """Replaces torch.compile and counts the graphs of each function that is compiled.

    Args:
        blocks: the name of the model's list of blocks.
    """

    def __init__(self, blocks: str) -> None:
        self._blocks = blocks
        self._parts: list[Traced] = []
        self._functions: list[Any] = []
        self._made: list[int] = []
        self._ran: list[int] = []
        self._graphs = 0
        self.is_other_length = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Replace torch.compile by this tracer inside the block."""
        compiled_loss.compiled_inner.cache_clear()
        stand_in = self._compile_with(torch.compile)
        # Our report lists the graph breaks, so torch's own warnings about them are silenced.
        with catch_warnings(action="ignore"), replace_attribute(torch, "compile", stand_in):
            yield
        compiled_loss.compiled_inner.cache_clear()

    def name_parts(self, model: nn.Module) -> None:
        """Name each compiled method after its module in the model."""
        names = {module: name for name, module in model.named_modules()}
        for part, function in zip(self._parts, self._functions, strict=True):
            # What recomputes activations wraps the method.
            method = unwrap(function)
            name = names.get(getattr(method, "__self__", None))
            if name:
                is_forward = method.__name__ == "forward"
                part.part = name if is_forward else f"{name}.{method.__name__}"

    def _compile_with(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def compile_(
            function: Callable[..., Any], dynamic: bool | None = None, **_: Any
        ) -> Callable[..., Any]:
            is_loss = function is compiled_loss.fusible_replace_by_gradient
            part = Traced("loss" if is_loss else f"{self._blocks}.{len(self._parts)}")
            self._parts.append(part)
            self._functions.append(function)
            compiled = original(function, backend=self._count, dynamic=dynamic)

            def watched(*args: Any, **kwargs: Any) -> Any:
                self._made.clear()
                self._ran.clear()
                graph_break_reasons.clear()
                messages = {*dynamo_counters["graph_break"]}
                out = compiled(*args, **kwargs)
                self._note(part, {*dynamo_counters["graph_break"]} - messages)
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
        """Return the functions with graphs or breaks, and count those that reuse the graphs."""
        parts = [part for part in self._parts if part.graphs or part.breaks]
        for part in self._parts:
            for other in parts:
                other.like_it += part is not other and part.used == other.used != ()
        return parts


def _break(reason: str, stack: list[Any]) -> Break:
    place = f"{stack[-1].filename}:{stack[-1].lineno}" if stack else ""
    return Break(" ".join(reason.strip().splitlines()[0].split()), place)
