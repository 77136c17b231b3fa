"""The table of supervised training of any module. Torch-free."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import model_validator

from ..metrics.tables import Outputs
from ..tables import LossConfig, TaskConfig, TaskData, TaskSettings

if TYPE_CHECKING:
    from ...data.collate import Collation
    from ...data.dataset import OpenedData
    from ...tokenizers.tokenizer import Tokenizer
    from ..task import Task


class Supervised(TaskConfig):
    """Train a module of a plugin on a data set of a plugin, by a criterion."""

    losses: ClassVar[tuple[str, ...]] = ("cross_entropy", "bce", "mse", "l1", "huber", "ctc")
    packings: ClassVar[tuple[str, ...]] = ("none", "ragged")
    axes: ClassVar[tuple[str, ...]] = ()
    needs_language_model: ClassVar[bool] = False

    name: Literal["supervised"] = "supervised"
    targets: list[str] = ["labels"]
    """fields that the criterion reads and the module does not"""
    class_dim: Literal[-1, 1] = -1
    """dimension of the outputs with the scores of classes: the last, or 1 as in torch's modules for
    images, [N, C, H, W]; losses and metrics get it as the last one"""
    padding: dict[str, float] = {}
    """of a field whose samples differ in length: what fills the shorter ones up to the longest of a
    batch"""
    ragged: list[str] = []
    """with data.packing = "ragged", fields whose first dimension has a size of its own in each
    sample: a batch has them flat, one sample after the other, and the module also gets `lengths`"""

    @model_validator(mode="after")
    def _check_fields(self) -> Self:
        if both := sorted({*self.padding} & {*self.ragged}):
            raise ValueError(f"ragged and padding both name {both[0]!r}")
        return self

    def outputs(self, loss: LossConfig) -> Outputs | None:
        """Return what the outputs of the module are to the loss; it says how many classes."""
        return Outputs(loss.outputs, may_be_maps=True) if loss.outputs else None

    def build_data(self, data: TaskData) -> OpenedData:
        """Open the data sets and hold samples out for validation."""
        from ...data.records import RecordOpener

        collation = self.build_collation(data.tokenizer, data.loss)
        opener = RecordOpener(data.table, data.tokenizer, collation, share=data.share)
        return opener.open_data(data.seed)

    def build_collation(self, tokenizer: Tokenizer, loss: LossConfig | None) -> Collation:
        """Return how samples are stacked."""
        from .task import make_collation

        return make_collation(self.padding, self.ragged)

    def build(self, settings: TaskSettings) -> Task[Any]:
        """Return supervised training."""
        from .task import SupervisedTask, make_collation

        return SupervisedTask(
            loss=settings.loss.build_criterion(),
            data=settings.data,
            targets=frozenset(self.targets),
            class_dim=self.class_dim,
            collation=make_collation(self.padding, self.ragged),
        )
