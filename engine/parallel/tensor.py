"""Tensor and sequence parallelism (arXiv:1909.08053, arXiv:2205.05198): matrices are split over
ranks, and between them the residual stream is, along the sequence.

Modules keep computing on plain tensors: a split weight is a DTensor that a module sees as the piece
of its rank. Collectives stand where the stream enters (after a norm) and leaves (after a sum).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from ...kernels.choose import Kernels
from ...kernels.cross_entropy import reference
from ...kernels.cross_entropy.reference import IGNORED
from .collectives import gather, gathered, scatter

if TYPE_CHECKING:
    from collections.abc import Hashable

    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from ...model_zoo.config import ModelConfig
    from ...model_zoo.language_model import LanguageModel

SEQUENCE, WIDTH = 1, 2


@dataclass(frozen=True)
class _Plan:
    """What the styles need to know."""

    mesh: DeviceMesh
    kv_heads: int

    @property
    def group(self) -> ProcessGroup:
        return self.mesh.get_group()

    @property
    def kv_heads_are_shared(self) -> bool:
        """Whether a head's keys and values are needed on several ranks."""
        return self.kv_heads < self.mesh.size()


def split(model: LanguageModel, config: ModelConfig, mesh: DeviceMesh) -> set[str]:
    """Split the weights of a model (still on `meta`) over the ranks of a mesh, in place.

    Args:
        model: whose layout has a style for each of its modules that holds weights.
        config: its sizes.
        mesh: of one axis.

    Returns:
        names of the weights that every rank holds whole. Their gradients are to be summed over the
        mesh after the backward pass: each rank has seen a part of the sequence or of the heads.
    """
    plan = _Plan(mesh, int(getattr(config, "n_kv_heads", 0)))
    whole = set()
    for name, style in config.layout.tensor_styles(n for n, _ in model.named_parameters()).items():
        path, _, key = name.rpartition(".")
        STYLES[style](model.get_submodule(path), plan)
        weight = model.get_submodule(path)._parameters[key]
        if cast(DTensor, weight).placements[0].is_replicate():
            whole.add(name)
    if head := dict(model.named_modules()).get(config.layout.head):  # not in a pipeline's middle
        head.register_forward_hook(partial(_join_logits, vocab_size=config.vocab, group=plan.group))
    return whole


def _columns(module: nn.Module, plan: _Plan) -> None:
    """Split a projection's outputs."""
    _place(module, plan, Shard(0))
    _use(module, _LocalWeight)


def _key_value(module: nn.Module, plan: _Plan) -> None:
    """Split the outputs by heads; where there are fewer than ranks, several compute the same."""
    if not plan.kv_heads_are_shared:
        _columns(module, plan)
        return
    _place(module, plan, Replicate())
    _use(module, _OneHead)
    one_head = cast(_OneHead, module)
    one_head.num_heads = plan.kv_heads
    one_head.head = plan.mesh.get_local_rank() * plan.kv_heads // plan.mesh.size()


def _rows(module: nn.Module, plan: _Plan) -> None:
    """Split a projection's inputs; the outputs are summed, and split along the sequence."""
    _place(module, plan, Shard(1))
    _use(module, _LocalWeight)
    module.register_forward_hook(partial(_leave, group=plan.group))


def _norm(module: nn.Module, plan: _Plan) -> None:
    """Keep a norm's weight whole; its output is gathered along the sequence."""
    _place(module, plan, Replicate())
    _use(module, _LocalWeight)
    module.register_forward_hook(partial(_enter, group=plan.group))


def _vocabulary(module: nn.Module, plan: _Plan) -> None:
    """Split an embedding by tokens; the outputs are split along the sequence."""
    rows = rows_a_rank(len(cast(Tensor, module.weight)), plan.mesh.size())
    _place(module, plan, Shard(0))
    _use(module, _SplitEmbedding)
    cast(_SplitEmbedding, module).first_row = rows * plan.mesh.get_local_rank()
    module.register_forward_hook(partial(_leave, group=plan.group))


STYLES: dict[str, Callable[[nn.Module, _Plan], None]] = {
    "columns": _columns,
    "key_value": _key_value,
    "rows": _rows,
    "norm": _norm,
    "vocabulary": _vocabulary,
}
"""Words of `Layout.tensor`."""


def _place(module: nn.Module, plan: _Plan, placement: Placement) -> None:
    weight = cast(nn.Parameter, module._parameters["weight"])
    placed = distribute_tensor(weight.data, plan.mesh, [placement], src_data_rank=None)
    module._parameters["weight"] = nn.Parameter(placed, requires_grad=weight.requires_grad)


def _enter(_module: nn.Module, _args: Any, out: Tensor, group: ProcessGroup) -> Tensor:
    return gather(out, SEQUENCE, group)


def _leave(_module: nn.Module, _args: Any, out: Tensor, group: ProcessGroup) -> Tensor:
    return scatter(out, SEQUENCE, group)


def _join_logits(
    _module: nn.Module, _args: Any, out: Tensor, vocab_size: int, group: ProcessGroup
) -> Tensor:
    if not out.ndim:  # the loss
        return out
    if torch.is_grad_enabled():
        raise RuntimeError(
            "logits of a split vocabulary have no gradient: let the model compute the loss"
        )
    missing = rows_a_rank(vocab_size, group.size()) - out.shape[-1]
    return gathered(F.pad(out, (0, missing)), WIDTH, group)[..., :vocab_size]


class _LocalWeight:
    """Gives a module the piece of its weight that this rank holds."""

    @property
    def weight(self) -> Tensor:
        return _local(cast(nn.Module, self)._parameters["weight"])


class _OneHead:
    """Gives a module the rows of its weight that make one head."""

    num_heads: int
    head: int

    @property
    def weight(self) -> Tensor:
        weight = _local(cast(nn.Module, self)._parameters["weight"])
        if isinstance(weight, DTensor):
            return weight
        return torch.chunk(weight, self.num_heads)[self.head]


class _SplitEmbedding(_LocalWeight):
    """Looks up the tokens whose rows this rank holds; the others become zero."""

    first_row: int

    def forward(self, tokens: Tensor) -> Tensor:
        weight = self.weight
        row = tokens - self.first_row
        is_here = (row >= 0) & (row < len(weight))
        return F.embedding(row.where(is_here, 0), weight) * is_here.unsqueeze(-1)


def _use(module: nn.Module, trait: type) -> None:
    # One class for all modules of a kind: compiled blocks share their code by it.
    module.__class__ = _with_trait(cast("Hashable", type(module)), trait)


@cache
def _with_trait(base: Any, trait: type) -> Any:
    return type(base.__name__, (trait, base), {})


def _local(weight: Tensor | None) -> Tensor:
    placed = cast(DTensor, weight)
    # Outside of a forward pass FSDP asks for what it has sharded, over a mesh of two axes.
    return placed.to_local() if placed.device_mesh.ndim == 1 else placed


def rows_a_rank(rows: int, ranks: int) -> int:
    """Return how many rows each rank holds; the last ones may hold fewer, as torch.chunk cuts."""
    return -(-rows // ranks)


def split_vocabulary(kernels: Kernels, vocab_size: int, mesh: DeviceMesh) -> Kernels:
    """Return kernels whose cross entropy takes this rank's rows of the head's weight."""
    first = rows_a_rank(vocab_size, mesh.size()) * mesh.get_local_rank()
    inner = partial(_replace_by_gradient, first=first, group=mesh.get_group())
    loss = partial(reference.linear_cross_entropy, inner=inner, is_split=True)
    return replace(kernels, linear_cross_entropy=loss)


def _replace_by_gradient(
    logits: Tensor, labels: Tensor, z_loss: float, first: int, group: ProcessGroup
) -> Tensor:
    """Return what the reference does, from logits of the tokens `first`, `first + 1`, ... alone."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    counted = (labels != IGNORED).to(wide.dtype)
    largest = wide.amax(-1)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group)
    powers = (wide - largest.unsqueeze(1)).exp_()
    label = labels - first
    is_here = (label >= 0) & (label < logits.shape[1])
    label = label.where(is_here, 0).unsqueeze(1)
    chosen = wide.gather(1, label).squeeze(1) * is_here
    sums = torch.stack([powers.sum(-1), chosen])
    dist.all_reduce(sums, group=group)
    total, chosen = sums
    log_partition = largest + total.log()
    losses = log_partition - chosen + z_loss * log_partition.square()
    scale = counted * (1 + 2 * z_loss * log_partition)
    gradient = powers.mul_((scale / total).unsqueeze(1))
    gradient.scatter_add_(1, label, -(counted * is_here).unsqueeze(1))
    logits.copy_(gradient)
    loss: Tensor = (losses * counted).sum()
    return loss
