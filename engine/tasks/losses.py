"""Tables of the losses of outputs and targets. Torch-free."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from ..core.config import CountOrZero
from .metrics.tables import Kind
from .tables import LossConfig

if TYPE_CHECKING:
    from .criteria import Criterion

PositiveFloat = Annotated[float, Field(gt=0)]


class BinaryCrossEntropy(LossConfig):
    """Binary cross entropy of each output with its own target, 0 to 1; outputs are logits."""

    tasks: ClassVar[tuple[str, ...]] = ()
    outputs: ClassVar[Kind | None] = "binary"

    name: Literal["bce"] = "bce"

    def build_criterion(self) -> Criterion:
        """Return the mean over elements."""
        import torch.nn.functional as F

        from .criteria import Elementwise

        return Elementwise(F.binary_cross_entropy_with_logits)


class MeanSquaredError(LossConfig):
    """Squared difference of each output and its target."""

    tasks: ClassVar[tuple[str, ...]] = ()
    outputs: ClassVar[Kind | None] = "regression"

    name: Literal["mse"] = "mse"

    def build_criterion(self) -> Criterion:
        """Return the mean over elements."""
        import torch.nn.functional as F

        from .criteria import Elementwise

        return Elementwise(F.mse_loss)


class MeanAbsoluteError(LossConfig):
    """Absolute difference of each output and its target."""

    tasks: ClassVar[tuple[str, ...]] = ()
    outputs: ClassVar[Kind | None] = "regression"

    name: Literal["l1"] = "l1"

    def build_criterion(self) -> Criterion:
        """Return the mean over elements."""
        import torch.nn.functional as F

        from .criteria import Elementwise

        return Elementwise(F.l1_loss)


class Huber(LossConfig):
    """Squared difference where it is small, absolute where it is large (Huber 1964)."""

    tasks: ClassVar[tuple[str, ...]] = ()
    outputs: ClassVar[Kind | None] = "regression"

    name: Literal["huber"] = "huber"
    delta: PositiveFloat = 1.0
    """difference at which the loss becomes linear"""

    def build_criterion(self) -> Criterion:
        """Return the mean over elements."""
        import torch.nn.functional as F

        from .criteria import Elementwise

        return Elementwise(partial(F.huber_loss, delta=self.delta))


class CTC(LossConfig):
    """Connectionist temporal classification of sequences without alignment (Graves et al. 2006)."""

    tasks: ClassVar[tuple[str, ...]] = ()

    name: Literal["ctc"] = "ctc"
    blank: CountOrZero = 0
    """the class that stands for no label"""

    def build_criterion(self) -> Criterion:
        """Return the mean over samples."""
        from .criteria import ConnectionistTemporal

        return ConnectionistTemporal(self.blank)
