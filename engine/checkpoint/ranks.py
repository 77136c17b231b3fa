"""Steps that every rank takes part in, and whose failure on one rank all ranks learn of."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from ..core.errors import CheckpointError, LostContact, TrainerError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Part = TypeVar("Part")
Whole = TypeVar("Whole")


class Ranks:
    """The ranks of a run, or the one process of a run without ranks.

    Args:
        group: a gloo group of all ranks; None: one process, and no collective is ever called.
    """

    def __init__(self, group: ProcessGroup | None) -> None:
        self.group = group
        self.rank = group.rank() if group else 0
        self.size = group.size() if group else 1

    def reduce(self, work: Callable[[], Part], combine: Callable[[list[Part]], Whole]) -> Whole:
        """Do `work` on each rank, then `combine` on rank 0; return its result on every rank.

        Raises:
            TrainerError: what a rank raised, on all of them.
            LostContact: a rank was lost.
        """
        return self.scatter(work, lambda parts: [combine(parts)] * self.size)

    def scatter(
        self, work: Callable[[], Part], divide: Callable[[list[Part]], list[Whole]]
    ) -> Whole:
        """Do `work` on each rank, then `divide` on rank 0; return to each rank its own entry.

        Raises:
            TrainerError: what a rank raised, on all of them.
            LostContact: a rank was lost.
        """
        mine = _attempt(work)
        if self.group is None:
            answers = [_attempt(lambda: divide([_unwrap(mine)])[0])]
        else:
            answers = self._exchange(mine, divide)
        answer: Whole = _unwrap(answers[0])
        return answer

    def _exchange(self, mine: Any, divide: Callable[[list[Any]], list[Any]]) -> list[Any]:
        """Gather the parts on rank 0 and scatter the answers; the objects stay inside the job."""
        import torch.distributed as dist

        parts = [None] * self.size if self.rank == 0 else None
        answers: list[Any] | None = None
        answer: list[Any] = [None]
        if isinstance(mine, TrainerError):
            mine = type(mine)(f"rank {self.rank}: {mine.message}", mine.hint)
        try:
            # An error travels as a value: a rank that raised before the collective would leave the
            # others waiting in it until the timeout.
            dist.gather_object(mine, parts, group=self.group, group_dst=0)
            if parts is not None:
                whole = _attempt(lambda: divide([_unwrap(part) for part in parts]))
                failed = isinstance(whole, TrainerError)
                answers = [whole] * self.size if failed else whole
            dist.scatter_object_list(answer, answers, group=self.group, group_src=0)
        except RuntimeError as error:  # gloo's word for a peer that is gone
            raise LostContact.by(self.rank, error) from error
        return answer


def _attempt(work: Callable[[], Any]) -> Any:
    """Return the result, or the error as one that travels between ranks."""
    try:
        return work()
    except TrainerError as error:
        return error
    except Exception as error:
        foreseen = CheckpointError(f"{type(error).__name__}: {error}")
        foreseen.__cause__ = error
        return foreseen


def _unwrap(value: Any) -> Any:
    if isinstance(value, TrainerError):
        raise value
    return value
