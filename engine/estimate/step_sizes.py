"""The sizes of a model that formulas of a step's time and memory need."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from ...kernels.torch_private import FakeTensorMode
from ...model_zoo.layout import Layout
from ...model_zoo.matrices import maps_hidden_states
from ..optim.parameters import parameter_groups
from ..optim.placement import ParameterPlacement
from ..optim.tables import OptimizerConfig
from ..parallel.mesh import Degrees
from ..precision.hardware import DTYPES
from ..recipe.schema import Recipe

if TYPE_CHECKING:
    from ...model_zoo.layers.configs import MoESettings


@dataclass(frozen=True)
class StepSizes:
    """The sizes of a model that the formulas use.

    Attributes:
        config: the model's config.
        block: the parameters of a block, its experts left out.
        experts: the parameters of a block's routed experts; 0 without any.
        ends: the parameters of embedding and head together.
        width: bytes of a parameter, and of a gradient.
        reduce_width: bytes of an element of the gradients that are reduced.
        state: bytes of optimizer state a parameter.
        saved: activation elements a token that a block saves for backward, summed over the ranks of
            the tensor axis.
        replicated: activation elements a token that every rank of the tensor axis saves: the inputs
            of attention and of the feed-forward layer.
        dense: weights of all blocks that multiply each token, routed experts left out.
        routed: weights of routed experts that multiply each token.
        head: weights of the head that multiply each token.
        attention: multiplications a token of scores and weighted values.
        moe: the settings of the experts, or None.
        expert_blocks: the share of blocks that have experts.
        is_frozen: whether adapters are trained beside frozen weights.
        gathers_float8: whether tensor ranks gather activations in float8.
    """

    config: Any
    block: int
    experts: int
    ends: int
    width: int
    reduce_width: int
    state: float
    saved: int
    replicated: int
    dense: float
    routed: float
    head: float
    attention: float
    moe: MoESettings | None
    expert_blocks: float
    is_frozen: bool
    gathers_float8: bool

    @classmethod
    def of(cls, recipe: Recipe) -> StepSizes:
        """Return the sizes of a recipe's model; activations as in section 4 of arXiv:2205.05198."""
        config: Any = recipe.model.with_vocab(recipe.vocab_size)
        shapes, seq_len = config.parameter_shapes(), recipe.data.largest.seq_len
        start, numbers = f"{config.layout.blocks}.", range(config.trained_blocks)
        blocks = sum(prod(shape) for name, shape in shapes.items() if name.startswith(start))
        stacks = {name: prod(s) for name, s in shapes.items() if config.layout.is_expert(name)}
        experts, frozen = sum(stacks.values()), config.frozen_prefixes
        moe = getattr(config, "moe", None)
        taken = moe.experts_per_token / moe.num_experts if moe else 0.0
        routed = taken * sum(n for name, n in stacks.items() if not name.startswith(frozen))
        heads = (config.n_heads + config.n_kv_heads) * config.head_width
        wide = 3 * config.ffn_dim if moe is None else moe.saved_activations(config.dim)
        dense = sum(map(config.matmul_parameters, numbers)) - routed
        attention = sum(config.attention_multiplications(each, seq_len) for each in numbers)
        precision, is_frozen = recipe.precision, bool(recipe.lora.rank)
        return cls(
            config,
            block=(blocks - experts) // config.num_blocks,
            experts=experts // config.num_blocks,
            ends=sum(map(prod, shapes.values())) - blocks,
            width=DTYPES[precision.parameters].itemsize,
            reduce_width=DTYPES[precision.reduce].itemsize,
            state=0.0 if is_frozen else _state_bytes(recipe.optimizer, shapes, config.layout),
            saved=2 * config.dim + 3 * heads + wide,
            replicated=2 * config.dim,
            dense=dense,
            routed=routed,
            head=config.flops_per_token(seq_len) / 6 - dense - routed - attention,
            attention=attention,
            moe=moe,
            expert_blocks=sum(bool(config.experts_of(each)) for each in numbers) / len(numbers),
            is_frozen=is_frozen,
            gathers_float8=precision.float8.enabled and precision.float8.gather_activations,
        )

    def held(self, blocks: int, degrees: Degrees) -> tuple[float, float]:
        """Return a rank's weights before they are sharded: of experts, and of everything else.

        The tensor axis splits all weights but experts, which `expert` and `expert_tensor` divide.
        """
        dense = (blocks * self.block + self.ends) / degrees.tensor
        return dense, blocks * self.experts / degrees.expert_ranks


def _state_bytes(
    config: OptimizerConfig, shapes: Mapping[str, tuple[int, ...]], layout: Layout
) -> float:
    """Return the optimizer's mean bytes of state for each element, measured without memory."""
    counts = Counter[tuple[tuple[int, ...], bool]]()
    for name, shape in shapes.items():
        is_matrix = config.needs_matrices and maps_hidden_states(name, shape, layout)
        matrices = prod(shape[:-2])  # those of a stack have equal states
        counts[shape[-2:], is_matrix] += matrices
    total = sum(prod(shape) * count for (shape, _), count in counts.items())
    size = sum(
        _measure_state(config, shape, is_matrix=is_matrix) * count
        for (shape, is_matrix), count in counts.items()
    )
    return size / max(1, total)


def _measure_state(config: OptimizerConfig, shape: tuple[int, ...], *, is_matrix: bool) -> int:
    """Return the bytes of the optimizer's state of a matrix, or of another weight."""
    config = config.model_copy(update={"groups": []})
    placements = {"weight": ParameterPlacement("weight", shape, is_matrix)}
    with FakeTensorMode(allow_non_fake_inputs=True):
        weight = torch.nn.Parameter(torch.zeros(shape))
        groups = parameter_groups([("weight", weight)], config, placements=placements)
        optimizer = config.build(groups, weight.device)
        weight.grad = torch.zeros_like(weight)
        optimizer.step()
    states = (value for state in optimizer.state.values() for value in state.values())
    return sum(value.nbytes for value in states if torch.is_tensor(value))
