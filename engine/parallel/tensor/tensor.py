"""Tensor and sequence parallelism (arXiv:1909.08053, arXiv:2205.05198): ranks split the matrices of
attention, feed-forward layer and vocabulary, and the residual stream along the sequence.

Layers keep computing with plain tensors, see `local_views`. The sequence is all-gathered after a
norm and reduce-scattered after a matmul whose weight is split along its input dimension ("rows").
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from ....kernels.choose import Kernels
from ....kernels.cross_entropy import reference
from ....kernels.cross_entropy.reference import IGNORED
from ....model_zoo.base import Model
from ....model_zoo.config import ModelConfig
from ....model_zoo.layers.dense import Embedding, RMSNorm
from ....model_zoo.layers.moe import moe_layers
from ..axis import (
    AxisParts,
    LocalParts,
    LocalRank,
    ParallelModel,
    SplitSettings,
    StepSettings,
)
from ..collectives import (
    all_gather_no_grad,
    all_reduce_no_grad,
    fuse_with_matmuls,
)
from ..gradient_reduction import make_replicated_reduction
from ..placement import CUT_DIMS, used_dim
from .local_views import LocalView, distribute_parameter, placement
from .sequence import (
    HOOKS,
    SPLIT_NORMS,
    all_gather_float8_sequence,
    all_gather_input,
    rms_norm_over_ranks,
    share_adapter,
    slice_sequence,
)
from .vocabulary import SplitVocabulary

WIDTH = 2


@dataclass(frozen=True)
class TensorParallel(AxisParts):
    """Splits matrices and the residual stream over the ranks of the tensor axis.

    Attributes:
        mesh: the tensor axis of the device mesh.
        device: the device of this rank.
        is_async: whether inductor fuses matmuls with the collectives before and after them.
    """

    mesh: DeviceMesh
    device: torch.device
    is_async: bool

    def adapt_kernels(self, kernels: Kernels, config: ModelConfig) -> Kernels:
        """Return kernels whose cross entropy takes this rank's rows of the head's weight."""
        return split_vocabulary(kernels, config.vocab, self.mesh)

    def split(
        self,
        model: Model,
        config: ModelConfig,
        parts: LocalParts,
        settings: SplitSettings,
    ) -> LocalParts:
        """Split parameters as the model's layout or a rule says, except those of split experts."""
        if self.is_async:
            fuse_with_matmuls(self.mesh.get_group(), self.device)
        stored = {n: dims["tensor"] for n, dims in settings.dims.items() if "expert" not in dims}
        whole = split(model, config, self.mesh, stored, settings.float8_layers)
        return replace(parts, tensor_replicated=whole)

    def wrap(
        self, wrapped: ParallelModel, parts: LocalParts, settings: StepSettings
    ) -> ParallelModel:
        """Sum the gradients of replicated parameters over the axis after the backward pass."""
        named = wrapped.model.named_parameters()
        replicated = [weight for name, weight in named if name in parts.tensor_replicated]
        add = make_replicated_reduction(
            replicated, dist.ReduceOp.SUM, [self.mesh.get_group()], self.device
        )
        # Before FSDP's averages: floating-point sums depend on their order in the last bit.
        return replace(
            wrapped,
            post_backward_reductions=[add, *wrapped.post_backward_reductions],
            manually_reduced={*wrapped.manually_reduced, *replicated},
        )


def make_axis(local: LocalRank) -> TensorParallel:
    """Return what the tensor axis does on this rank."""
    assert local.mesh is not None, "a plan that splits matrices has a mesh"
    return TensorParallel(local.mesh["tensor"], local.device, local.table.async_tensor)


def split(
    model: Model,
    config: ModelConfig,
    mesh: DeviceMesh,
    stored: Mapping[str, int | None],
    float8_layers: Collection[str] = (),
) -> set[str]:
    """Split the weights of a model on the meta device over the ranks of a mesh, in place.

    Args:
        model: the model, whose layout has a style for each module with weights.
        config: the model's config.
        mesh: the tensor axis of the device mesh.
        stored: for each parameter name, the dimension that is split over ranks, or None where every
            rank stores the whole parameter. Parameters without an entry are left alone.
        float8_layers: paths of the layers for which the sequence is gathered in float8.

    Returns:
        the names of the parameters that every rank stores whole. Their gradients must be summed
        over the mesh after the backward pass: each rank has seen a part of the sequence or of the
        heads.
    """
    whole = set()
    layers = moe_layers(model).values()
    # A mixture of experts computes its rank's part of the sequence, so that no two ranks send the
    # same token to experts. The norm before it therefore gathers nothing.
    model.own_positions = partial(slice_sequence, model.own_positions, mesh=mesh)
    model.own_hidden = partial(slice_sequence, model.own_hidden, mesh=mesh)
    inside = {layer.norm for layer in layers}
    for layer in layers:
        # The balance loss needs the counts of whole sequences. Counts have no gradient.
        count, group = layer.router.sum_of_sequence, mesh.get_group()
        layer.router.sum_of_sequence = partial(_count_over_ranks, count, group=group)
    for path, module in list(model.named_modules()):
        style = ""
        for key, weight in list(module.named_parameters(recurse=False)):
            name = f"{path}.{key}"
            if name not in stored:
                continue
            style, used = used_dim(name, config, mesh.size())
            view = _local_view(tuple(weight.shape), key, style, stored[name], used, config, mesh)
            distribute_parameter(module, key, mesh, [placement(stored[name])], view)
            if stored[name] is None:
                whole.add(name)
        if style == "vocabulary":
            first_row = rows_per_rank(config.vocab, mesh.size()) * mesh.get_local_rank()
            cast("Embedding", module).lookup = partial(_look_up_rows, first_row=first_row)
        share_adapter(module, mesh, shares_columns=style == "rows")
        if isinstance(module, RMSNorm) and style in SPLIT_NORMS:
            module.kernel = partial(rms_norm_over_ranks, group=mesh.get_group())
        if style in HOOKS and module not in inside:
            is_narrow = style == "norm" and path.rpartition(".")[0] in float8_layers
            hook = all_gather_float8_sequence if is_narrow else HOOKS[style]
            module.register_forward_hook(partial(hook, group=mesh.get_group()))
    narrow = [module for path, module in model.named_modules() if path in float8_layers]
    for block in config.layout.find_blocks(model):
        for path in config.layout.gathered:
            entered = block.get_submodule(path)
            gather = partial(all_gather_input, group=mesh.get_group(), in_float8=entered in narrow)
            entered.register_forward_pre_hook(gather)
    head = dict(model.named_modules()).get(config.layout.head)  # None in a pipeline's middle
    if head and not config.task_head:
        gather_logits = partial(_gather_logits, vocab_size=config.vocab, group=mesh.get_group())
        head.register_forward_hook(gather_logits)
    return whole


def _count_over_ranks(
    count: Callable[[Tensor], Tensor], chosen: Tensor, group: ProcessGroup
) -> Tensor:
    return all_reduce_no_grad(count(chosen), group)


def _local_view(
    shape: tuple[int, ...],
    key: str,
    style: str,
    stored: int | None,
    used: int | None,
    config: ModelConfig,
    mesh: DeviceMesh,
) -> LocalView:
    group, ranks, rank = mesh.get_group(), mesh.size(), mesh.get_local_rank()
    joined = stored if stored != used else None
    if style == "key_value" and used is None and key in CUT_DIMS[style]:
        # Fewer key and value heads than ranks: several ranks compute the same head.
        heads = int(config.n_kv_heads)  # type: ignore[attr-defined]
        width = shape[0] // heads
        return LocalView(group, joined, (0, rank * heads // ranks * width, width))
    if used is None or used == stored:
        return LocalView(group, joined, counts=(style, key) != ("rows", "bias") or rank == 0)
    # A rule stores it in another way than it is used: gather what is split, then take a part. Parts
    # are those of torch.chunk, and past the end a rank has none.
    rows = rows_per_rank(shape[used], ranks)
    start = min(rows * rank, shape[used])
    return LocalView(group, joined, (used, start, min(rows, shape[used] - start)))


def _gather_logits(
    _module: nn.Module, _args: Any, out: Tensor, vocab_size: int, group: ProcessGroup
) -> Tensor:
    if not out.ndim:  # the loss
        return out
    if torch.is_grad_enabled():
        raise RuntimeError(
            "logits of a split vocabulary have no gradient: let the model compute the loss"
        )
    # An all-gather takes parts of equal size: the last ranks pad theirs.
    missing = rows_per_rank(vocab_size, group.size()) - out.shape[-1]
    return all_gather_no_grad(F.pad(out, (0, missing)), WIDTH, group)[..., :vocab_size]


def _look_up_rows(tokens: Tensor, weight: Tensor, first_row: int) -> Tensor:
    """Look up the tokens whose rows this rank holds, and return zeros for the others, [B, S, D]."""
    # The reduce-scatter after it adds the one row and the zeros. A boolean index would be shorter,
    # but would wait for the device to learn how many tokens there are.
    row = tokens - first_row
    is_here = (row >= 0) & (row < len(weight))
    return F.embedding(row.where(is_here, 0), weight) * is_here.unsqueeze(-1)


def rows_per_rank(rows: int, ranks: int) -> int:
    """Return the number of rows of each rank; the last ranks may hold fewer, as in torch.chunk."""
    return -(-rows // ranks)


def split_vocabulary(kernels: Kernels, vocab_size: int, mesh: DeviceMesh) -> Kernels:
    """Return kernels whose losses take this rank's rows of the head's weight."""
    first = rows_per_rank(vocab_size, mesh.size()) * mesh.get_local_rank()
    inner = partial(_replace_by_gradient, first=first, group=mesh.get_group())
    loss = partial(reference.linear_cross_entropy, inner=inner, is_split=True)
    reasons = {**kernels.reasons, "linear_cross_entropy": "torch: the vocabulary is split"}
    vocabulary = SplitVocabulary(first, mesh.get_group())
    return replace(kernels, linear_cross_entropy=loss, reasons=reasons, vocabulary=vocabulary)


def _replace_by_gradient(
    logits: Tensor, labels: Tensor, z_loss: float, first: int, group: ProcessGroup
) -> tuple[Tensor, Tensor]:
    """Return losses and z terms, [T] each, and write the gradient over the logits.

    It computes what `reference.replace_by_gradient` computes of all logits.

    Args:
        logits: this rank's columns, [T, V / ranks]: the tokens `first`, `first + 1`, ...
        labels: [T], the same on all ranks.
        z_loss: see `reference.linear_cross_entropy`.
        first: the token of the first column.
        group: process group of the tensor axis.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    counted = (labels != IGNORED).to(wide.dtype)
    largest = wide.amax(-1)
    # The ranks' sums of exponentials add up only if all subtract the same maximum.
    dist.all_reduce(largest, dist.ReduceOp.MAX, group)
    powers = (wide - largest.unsqueeze(1)).exp_()
    label = labels - first
    is_here = (label >= 0) & (label < logits.shape[1])
    label = label.where(is_here, 0).unsqueeze(1)
    chosen = wide.gather(1, label).squeeze(1) * is_here
    # One all-reduce for both: the label's logit is on one rank, zero on the others.
    sums = torch.stack([powers.sum(-1), chosen])
    dist.all_reduce(sums, group=group)
    total, chosen = sums
    log_partition = largest + total.log()
    losses = (log_partition - chosen) * counted
    penalties = z_loss * log_partition.square() * counted
    # From here on each rank computes its own columns of softmax; nothing else is exchanged.
    scale = counted * (1 + 2 * z_loss * log_partition)
    gradient = powers.mul_((scale / total).unsqueeze(1))
    gradient.scatter_add_(1, label, -(counted * is_here).unsqueeze(1))
    logits.copy_(gradient)
    return losses, penalties
