"""What an axis of the device mesh does to a run, and the model that comes of it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ...model_zoo.base import Model
from ..data.batch import Batch
from .mesh import Degrees
from .pipeline.cut import EndCosts, StageSplit

# For annotations alone: torch's pipelining takes long to load, and few runs have a pipeline.
if TYPE_CHECKING:
    from ...kernels.choose import Kernels
    from ...model_zoo.config import ModelConfig
    from .pipeline.pipeline import Pipeline
    from .pipeline.stage import Stage
    from .tables import Parallel


@dataclass(frozen=True)
class Sharing:
    """How ranks share blocks, as far as compilation and recomputation depend on it.

    Attributes:
        splits_weights: tensor parallelism splits the blocks' weights.
        shares_experts: ranks send each other tokens inside a block.
        splits_backward: gradients of inputs and of weights are computed in separate passes.
    """

    splits_weights: bool = False
    shares_experts: bool = False
    splits_backward: bool = False


ALONE = Sharing()


@dataclass(frozen=True)
class LocalRank:
    """This rank among all ranks of a run.

    Attributes:
        table: the recipe's `[parallel]`.
        degrees: the size of each axis, with -1 replaced.
        rank: global rank.
        device: the device of this rank.
        mesh: the mesh over which parameters are placed; None: every rank holds them whole.
        is_simulated: the other ranks do not exist and tensors have no content.
    """

    table: Parallel
    degrees: Degrees
    rank: int
    device: torch.device
    mesh: DeviceMesh | None
    is_simulated: bool = False


@dataclass(frozen=True)
class LocalParts:
    """What this rank holds of a model.

    Attributes:
        embed: path of the embedding.
        tensor_replicated: names of parameters that every rank of the tensor axis holds whole. Each
            has seen a part of the sequence or of the heads, so that their gradients are summed.
        fsdp_ignored: names of parameters that FSDP does not shard, whose gradients are averaged
            over the data axes as FSDP does with the others.
        stages: this rank's pipeline stages by number.
        cut: how blocks are divided into stages; None without pipeline parallelism.
        hidden_width: size of the hidden states that stages send each other.
    """

    embed: str = ""
    tensor_replicated: set[str] = field(default_factory=set)
    fsdp_ignored: set[str] = field(default_factory=set)
    stages: dict[int, Stage] = field(default_factory=dict)
    cut: StageSplit | None = None
    hidden_width: int = 0


@dataclass(frozen=True)
class SplitSettings:
    """How a model is to be split.

    Attributes:
        dims: for each parameter name, the tensor dimension that each axis splits; None: the ranks
            of the axis hold the same.
        compute: dtype of gathered parameters.
        reduce: dtype of gradient reduction.
        costs: measured costs by which pipeline stages are balanced; None: estimated ones.
        float8_layers: paths of the layers for which tensor ranks gather the sequence in float8.
    """

    dims: Mapping[str, Mapping[str, int | None]]
    compute: torch.dtype
    reduce: torch.dtype
    costs: EndCosts | None = None
    float8_layers: Collection[str] = ()


@dataclass(frozen=True)
class StepSettings:
    """The sizes and dtypes of a training step that wrappers need.

    Attributes:
        reduce: dtype of gradient reduction.
        num_positions: positions of a row of the data, over all ranks.
        micro_batches: micro batches of one optimizer step in a pipeline.
    """

    reduce: torch.dtype
    num_positions: int
    micro_batches: int


@dataclass(frozen=True)
class ParallelModel:
    """A model wrapped for distributed training, with the hooks that a training step needs.

    Attributes:
        model: the unwrapped module. Parameter names, state dicts and evaluation use it.
        forward: the wrapped forward pass: of DDP, of FSDP2, or of the module itself.
        set_gradient_sync: called with True before the backward pass of the last micro batch and
            with False before the others, so that gradients are reduced once per step.
        gradient_divisor: DDP and FSDP divide gradients by the number of ranks that they reduce
            over, and a step needs the sum: it multiplies each loss by this number, so that nothing
            else has to know.
        post_backward_reductions: called in order after the last backward pass, for gradients that
            neither DDP nor FSDP reduces (tied embeddings, parameters replicated over the tensor
            axis).
        manually_reduced: the parameters whose gradients are final only after these reductions.
        pipeline: runs the forward and backward passes of a model that is split into pipeline
            stages; None without pipeline parallelism.
        duplicate_parameters: parameters of which another rank owns the canonical copy, such as a
            tied embedding on the last stage. Gradient norms and exports leave them out.
        owns_gradient_buffers: whether the wrapper uses gradient memory again in the next step (DDP
            buckets), so that gradients are zeroed in place instead of being set to None.
    """

    model: Model
    forward: Callable[..., Tensor]
    # The defaults suit a model on one rank: nothing to reduce, and nothing to divide by.
    set_gradient_sync: Callable[[bool], None] = lambda last: None
    gradient_divisor: int = 1
    post_backward_reductions: Sequence[Callable[[], None]] = ()
    manually_reduced: Collection[nn.Parameter] = ()
    pipeline: Pipeline | None = None
    duplicate_parameters: tuple[nn.Parameter, ...] = ()
    owns_gradient_buffers: bool = False


class AxisParts:
    """What one kind of parallelism does to a run on this rank; by default, nothing.

    `plan` calls each method for all axes of more than one rank, from the outermost to the innermost
    one and then for FSDP or DDP; `wrap` in the opposite order.
    """

    only_reduces_gradients: ClassVar[bool] = False
    """whether a model that is not trained can do without it"""

    def adapt_kernels(self, kernels: Kernels, config: ModelConfig) -> Kernels:
        """Return kernels that compute this rank's part of attention and loss."""
        return kernels

    def take(self, batch: Batch) -> Batch:
        """Return the part of a batch that this rank computes, such as its positions of each row."""
        return batch

    def split(
        self,
        model: Model,
        config: ModelConfig,
        parts: LocalParts,
        settings: SplitSettings,
    ) -> LocalParts:
        """Split a model on the meta device over the axis, in place; parameters keep their names.

        Args:
            model: the model, as the axes before this one left it.
            config: the model's config.
            parts: what the axes before this one returned.
            settings: the dimension that each axis splits, the dtypes and the stages' costs.

        Returns:
            `parts` with what this axis adds to it.
        """
        return parts

    def wrap(
        self, wrapped: ParallelModel, parts: LocalParts, settings: StepSettings
    ) -> ParallelModel:
        """Wrap a split model for training, once its parameters are on the device."""
        return wrapped
