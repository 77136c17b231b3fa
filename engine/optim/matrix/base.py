"""The base class of optimizers that update matrices as wholes, and all else by AdamW."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.optim import AdamW, Optimizer

from ....kernels.torch_private import (
    foreach_lerp_,
    functional_collectives,
)
from ..elementwise.base import Group, Tensors, apply_updates
from ..elementwise.qhadam import QHAdamOptimizer
from ..parameters import local_shards
from ..placement import OWNED, ParameterPlacement
from .exchange import (
    assemble_matrices,
    finish_transfer,
    join_pieces,
    split_pieces,
    start_transfer,
)
from .rounds import OwnedMatrix, Round, assign_owners, plan_rounds

ADAMW = ("lr", "weight_decay", "betas", "eps")
"""options of a group that AdamW updates"""


class MatrixTask(NamedTuple):
    """A round of the matrices of a parameter group.

    Attributes:
        group: the options.
        round: the round.
        placements: the placements of the parameters.
        weights: this rank's parts of the parameters that the pieces of the round belong to.
        gradients: the gradients of these parts.
        momenta: running means of the gradients.
    """

    group: Group
    round: Round
    placements: list[ParameterPlacement]
    weights: Tensors
    gradients: Tensors
    momenta: Tensors


class MatrixOptimizer(Optimizer):
    """Updates matrices by a function of whole matrices, under any parallelism plan.

    Momentum is sharded as the weights are. For each matrix, one rank gets the whole momentum,
    computes the update, and sends each rank its part; `rounds.py` says which rank.

    Args:
        groups: parameter groups of torch, each with `placements`, the `ParameterPlacement` of each
            of its parameters, and `is_matrix`, whether its parameters are matrices.
        device: where matrices are multiplied; offloaded parameters are elsewhere.
        adamw: AdamW's options for groups of other parameters.
        options: options for groups of matrices.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        device: torch.device,
        adamw: dict[str, Any],
        **options: Any,
    ) -> None:
        super().__init__([dict(group) for group in groups], options)
        others = [group for group in self.param_groups if not group["is_matrix"]]
        self._matrix_groups = [group for group in self.param_groups if group["is_matrix"]]
        self._device = device
        self._group: ProcessGroup | None = None
        self._rounds: dict[Any, list[Round]] = {}
        self._matrices: list[list[OwnedMatrix]] = []
        self._is_owned: dict[int, list[bool]] = {}
        """whether this rank owns each matrix of a parameter, by the parameter's `id`"""
        self._assign_owners()
        self._adamw: Optimizer | None = None
        if others:
            # The groups are the same objects in both optimizers, so that rates are set once.
            self._adamw = (
                QHAdamOptimizer(others, nus=(1.0, 1.0), **adamw)
                if options.get("cautious_decay")
                else AdamW(others, fused=True, **adamw)
            )

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        with local_shards(self):
            if self._adamw:
                self._adamw.state = self.state
                inspect.unwrap(type(self._adamw).step)(self._adamw)
            self.step_matrices(self._prepare_tasks())

    def _assign_owners(self) -> None:
        """Give each matrix of each group an owner, which stays the same for the whole run."""
        loads: list[float] = []
        for group in self._matrix_groups:
            placements: list[ParameterPlacement] = group["placements"]
            first = placements[0]
            loads = loads or [0.0] * first.ranks
            self._group = first.group
            self._matrices.append(assign_owners(placements, loads))
            # In the order of their numbers, which `assign_owners` does not keep.
            for each in sorted(self._matrices[-1], key=lambda each: each.matrix.number):
                owned = self._is_owned.setdefault(id(group["params"][each.parameter]), [])
                owned.append(each.owner == first.rank)

    def _prepare_tasks(self) -> list[MatrixTask]:
        """Update the momenta, and return the rounds of all groups."""
        tasks = []
        for number, group in enumerate(self._matrix_groups):
            for places in self.select(group):
                weights: Tensors = [group["params"][place] for place in places]
                gradients = [cast(Tensor, weight.grad) for weight in weights]
                momenta = self.update_momenta(group, weights, gradients)
                placements = [group["placements"][place] for place in places]
                tasks += [
                    MatrixTask(group, this, placements, weights, gradients, momenta)
                    for this in self._plan(number, tuple(places), placements[0])
                ]
        return tasks

    def select(self, group: Group) -> list[list[int]]:
        """Return the places in a group of parameters with gradients: a list for those that are
        updated together.
        """
        found = [place for place, weight in enumerate(group["params"]) if weight.grad is not None]
        return [found] if found else []

    def update_momenta(self, group: Group, weights: Tensors, gradients: Tensors) -> Tensors:
        """Update the running means of the gradients of this rank's parts, and return them."""
        for weight in weights:
            if "momentum_buffer" not in self.state[weight]:
                self.state[weight]["momentum_buffer"] = torch.zeros_like(weight)
        momenta = [self.state[weight]["momentum_buffer"] for weight in weights]
        # A mean in place of a sum: a constant factor, which an update does not depend on.
        foreach_lerp_(momenta, gradients, 1 - group["momentum"])
        return momenta

    def _plan(
        self, number: int, places: tuple[int, ...], placed: ParameterPlacement
    ) -> list[Round]:
        """Return the rounds of the parameters at some places of a group, planned once."""
        if (number, places) not in self._rounds:
            numbers = {place: index for index, place in enumerate(places)}
            chosen = [
                each._replace(parameter=numbers[each.parameter])
                for each in self._matrices[number]
                if each.parameter in numbers
            ]
            self._rounds[number, places] = plan_rounds(chosen, placed.ranks, placed.rank)
        return self._rounds[number, places]

    def step_matrices(self, tasks: Sequence[MatrixTask]) -> None:
        """Compute round after round, while the matrices of the next one and results travel."""
        gathering = self._gather(tasks[0]) if tasks else None
        scattering: tuple[MatrixTask, Tensor | Tensors] | None = None
        for number, task in enumerate(tasks):
            assert gathering is not None, "each round is gathered before it is computed"
            flat = finish_transfer(task.round.gather, gathering, self._group)
            matrices = assemble_matrices(task.round, flat)
            gathering = self._gather(tasks[number + 1]) if number + 1 < len(tasks) else None
            updates = self.compute_updates(task, matrices)
            if scattering:
                self._finish(*scattering)
            scattering = task, self._scatter(task, updates)
        if scattering:
            self._finish(*scattering)

    def _gather(self, task: MatrixTask) -> Tensor:
        group, sent = task.group, task.round.gather.sent
        momenta = [task.momenta[piece.tensor][piece.slices] for piece in sent]
        flat = join_pieces(momenta, task.weights[0])
        if group["nesterov"] and sent:
            gradients = [task.gradients[piece.tensor][piece.slices] for piece in sent]
            foreach_lerp_(split_pieces(sent, flat), gradients, 1 - group["momentum"])
        flat = flat.to(self._device, torch.bfloat16 if group["is_narrow"] else flat.dtype)
        return start_transfer(task.round.gather, flat, self._group)

    def _scatter(self, task: MatrixTask, updates: Tensor) -> Tensor | Tensors:
        """Start to send updates; return them, or the pending result where ranks send any."""
        scatter = task.round.scatter
        pieces = [updates[piece.slices] for piece in scatter.sent]
        if self._group is None or not scatter.is_needed:
            return pieces  # spares a copy
        return start_transfer(scatter, join_pieces(pieces, updates), self._group)

    def _finish(self, task: MatrixTask, pending: Tensor | Tensors) -> None:
        """Wait for the updates of a round, and change this rank's weights."""
        scatter = task.round.scatter
        if isinstance(pending, Tensor):
            flat = finish_transfer(scatter, pending, self._group).to(task.weights[0])
            pending = split_pieces(scatter.received, flat)
        updates = [piece.to(task.weights[0]) for piece in pending]
        weights = [task.weights[piece.tensor][piece.slices] for piece in scatter.received]
        self.apply(task, weights, updates)

    def compute_updates(self, task: MatrixTask, matrices: Tensor) -> Tensor:
        """Return the updates of matrices, before they are scaled, [N, rows, columns].

        All ranks call it for the same rounds, some of them without matrices.

        Args:
            task: what is computed.
            matrices: momenta, in the dtype of the computation, [N, rows, columns].
        """
        raise NotImplementedError

    def scale_of(self, group: Group, rows: int, columns: int) -> float:
        """Return what multiplies the update of a matrix of this shape."""
        raise NotImplementedError

    def apply(self, task: MatrixTask, weights: Tensors, updates: Tensors) -> None:
        """Change pieces of this rank's weights, given their updates before these are scaled."""
        if weights:
            scale = self.scale_of(task.group, *task.round.shape)
            apply_updates(task.group, weights, updates, scale)

    def read_states(self, task: MatrixTask, key: str, shape: tuple[int, ...]) -> list[Tensor]:
        """Return, for each matrix of a round, a view of a state that each rank holds whole.

        Args:
            task: the round and its parameters.
            key: the key of the state, of which there is one tensor a parameter, made of zeros.
            shape: what of the state belongs to a row of a matrix: `()`; or to a matrix: `(0,)`.
        """
        found = []
        for parameter, matrix in task.round.matrices:
            weight, placement = task.weights[parameter], task.placements[parameter]
            state = self.state[weight]
            if key not in state:
                sizes = (placement.num_matrices,) if shape else placement.shape[:-1]
                state[key] = torch.zeros(sizes, dtype=weight.dtype, device=self._device)
            found.append(
                state[key][matrix.number if shape else (*matrix.place, slice(*matrix.rows))]
            )
        return found

    def read_owned(
        self, task: MatrixTask, shapes: Mapping[str, tuple[int, ...]]
    ) -> dict[str, Tensors]:
        """Return states of the matrices that this rank owns: of each key, one a matrix.

        Args:
            task: the round and its parameters.
            shapes: shape of a state, which is made of zeros, by key.
        """
        found: dict[str, Tensors] = {key: [] for key in shapes}
        for parameter, matrix in task.round.owned:
            weight = task.weights[parameter]
            state = self.state[weight]
            for key, shape in shapes.items():
                name = f"{key}{OWNED}{matrix.number}"
                if name not in state:
                    state[name] = torch.zeros(shape, dtype=weight.dtype, device=self._device)
                found[key].append(state[name])
        return found

    def make_state(
        self, weight: Tensor, key: str, shape: Sequence[int], dtype: torch.dtype
    ) -> Tensor | None:
        """Return memory for a saved state that is not laid out like the weight; None: none here.

        Args:
            weight: the parameter.
            key: the key of the state.
            shape: the global shape of the state.
            dtype: the dtype of the state.
        """
        if id(weight) not in self._is_owned:
            return torch.empty(shape, dtype=dtype, device=weight.device)  # AdamW's
        _, mark, number = key.partition(OWNED)
        if mark and not self._is_owned[id(weight)][int(number)]:
            return None
        return torch.empty(shape, dtype=dtype, device=self._device)

    def sum_over_ranks(self, values: Tensor) -> Tensor:
        """Return the sum over the ranks that share matrices."""
        if self._group is None:
            return values
        summed: Tensor = functional_collectives.all_reduce(values, "sum", self._group)
        return summed
