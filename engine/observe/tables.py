"""The recipe's `[metrics]` and `[profile]` tables, and the registries of trackers and monitors.

Torch-free.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol

from pydantic import Field

from ..core.config import Component, Count, CountOrZero, Table
from ..core.registry import Named, Registry

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from .monitors.monitored_model import MonitoredModel
    from .numbers import Number
    from .phases import PhaseTimer
    from .profiler import Profiler


class Tracker(Protocol):
    """A service or file that gets metric rows; only rank 0 has one."""

    def log(self, row: Mapping[str, Any]) -> None:
        """Send one row of metrics.jsonl (`kind`, `step`, numbers and histograms)."""

    def close(self) -> None:
        """Send the rows that are buffered."""


class TrackerConfig(Component):
    """Base of every tracker's table."""

    def build(self, run_dir: Path, resume_step: int) -> Tracker:
        """Build the tracker.

        Args:
            run_dir: the run directory, which holds the resolved recipe already
                (`run_dir.read_recipe`).
            resume_step: the step after which the run resumes; rows of later steps, which an earlier
                attempt wrote, are void.
        """
        raise NotImplementedError


trackers: Registry[TrackerConfig] = Registry("tracker", default="tensorboard")


@trackers.register
class TensorBoard(TrackerConfig):
    """Scalars for TensorBoard in the run directory's `tensorboard/` (extra `[tensorboard]`)."""

    name: Literal["tensorboard"] = "tensorboard"

    def build(self, run_dir: Path, resume_step: int) -> Tracker:
        """Return a writer of event files."""
        from .tensorboard import TensorBoardTracker

        return TensorBoardTracker(run_dir / "tensorboard", resume_step)


@trackers.register
class WandB(TrackerConfig):
    """Weights & Biases, one run there for all attempts (extra `[wandb]`)."""

    name: Literal["wandb"] = "wandb"
    project: str = "trainer"
    """where the run appears"""
    entity: str = ""
    """user or team; default: that of the login"""
    run_name: str = ""
    """default: the name of the run directory"""
    group: str = ""
    """what the run is a part of, such as a sweep"""
    tags: list[str] = []
    """words to find it by"""
    mode: Literal["auto", "online", "offline"] = "auto"
    """"auto": what WANDB_MODE says, else online; "offline" keeps it for `wandb sync`"""

    def build(self, run_dir: Path, resume_step: int) -> Tracker:
        """Return a sender to one run of W&B."""
        from .wandb import WandBTracker

        return WandBTracker(self, run_dir)


@trackers.register
class MLflow(TrackerConfig):
    """MLflow, one run there for all attempts (extra `[mlflow]`)."""

    name: Literal["mlflow"] = "mlflow"
    tracking_uri: str = ""
    """a server or a folder; default: MLFLOW_TRACKING_URI, else mlruns beside the run directory"""
    experiment: str = "trainer"
    """where the run appears; made if it is not there"""
    run_name: str = ""
    """default: the name of the run directory"""
    tags: list[str] = []
    """`key=value` or plain words"""

    def build(self, run_dir: Path, resume_step: int) -> Tracker:
        """Return a sender to one run of MLflow."""
        from .mlflow import MLflowTracker

        return MLflowTracker(self, run_dir)


class Profile(Table):
    """Where the time and the memory of some steps go."""

    steps: CountOrZero = 0
    """how many optimizer steps are profiled; 0: none"""
    start: Count = 10
    """the first of them, counted from where this attempt starts"""
    memory: bool = False
    """also record every allocation: a memory snapshot on a GPU, a memory column on a CPU"""
    ranks: Annotated[list[CountOrZero], Field(min_length=1, max_length=1024)] = [0]
    """which ranks write traces to profiles/ in the run directory"""

    def build(
        self,
        phases: PhaseTimer,
        folder: Path,
        *,
        rank: int,
        is_main: bool,
        device: torch.device,
        flops_per_step: Callable[[], float],
    ) -> Profiler:
        """Build the profiler of a rank; `Profiler` describes the arguments."""
        from .profiler import Profiler

        return Profiler(
            self.start,
            self.steps,
            self.memory,
            phases,
            folder,
            rank,
            is_main,
            device,
            flops_per_step,
        )


class Monitor:
    """Measures numbers of training on the steps that are due; other steps do not call it.

    The methods are called in their order here. Each rank adds its share of every sum, and one
    all-reduce adds up the sums of all monitors. By default, a method does nothing.

    Attributes:
        num_sums: how many sums the monitor has, the same on all ranks.
    """

    num_sums: int = 0

    def before_forward(self) -> None:
        """Prepare the step, for instance by hooks on modules."""

    def after_backward(self) -> None:
        """Remove hooks; called also if the step is skipped afterwards."""

    def before_update(self, sums: Tensor, clip_factor: Tensor | None) -> None:
        """Measure before the optimizer changes the weights.

        Args:
            sums: fp64 [num_sums], zeros on the device, which this rank adds to in place.
            clip_factor: what gradients were multiplied by to clip them; None: not clipped.
        """

    def after_update(self, sums: Tensor) -> None:
        """Measure after the optimizer has changed the weights; `sums` as in `before_update`."""

    def metrics(self, sums: Tensor) -> Mapping[str, Number]:
        """Return numbers and histograms, on the device, from the sums over all ranks."""
        raise NotImplementedError


class MonitorConfig(Component):
    """Base of every monitor's table."""

    interval: Count = 100
    """optimizer steps between measurements"""

    @property
    def copies_weights(self) -> bool:
        """Whether a due step takes memory for a copy of weights, which estimates simulate."""
        return False

    @property
    def measures_all(self) -> bool:
        """Whether all layers are measured alike."""
        return True

    def build(self, model: MonitoredModel) -> Monitor:
        """Build the monitor of this rank."""
        raise NotImplementedError


monitors: Registry[MonitorConfig] = Registry("monitor", default="norms")
NormKind = Literal["weights", "gradients", "updates", "update_ratios"]
HistogramKind = Literal["weights", "gradients", "updates"]


@monitors.register
class Norms(MonitorConfig):
    """L2 norms of weights, gradients and updates, of each layer."""

    name: Literal["norms"] = "norms"
    of: Annotated[list[NormKind], Field(min_length=1)] = ["weights", "gradients", "updates"]
    """"weights" before the update; "gradients" before clipping; "updates", the changes of weights,
    which take a copy of the weights on a due step; "update_ratios", update norm by weight norm"""
    by: Literal["layer", "parameter"] = "layer"
    """one number for each layer (embedding, block, head), or for each parameter"""

    def build(self, model: MonitoredModel) -> Monitor:
        """Return a measurer of norms."""
        from .monitors.norms import NormMonitor

        return NormMonitor(model, self.of, by_layer=self.by == "layer")

    @property
    def copies_weights(self) -> bool:
        """Whether updates are measured."""
        return bool({"updates", "update_ratios"} & {*self.of})


@monitors.register
class Histograms(MonitorConfig):
    """Histograms of weights, gradients and updates, of each layer."""

    name: Literal["histograms"] = "histograms"
    of: Annotated[list[HistogramKind], Field(min_length=1)] = ["weights", "gradients", "updates"]
    """"weights" before the update; "gradients" before clipping; "updates", the changes of weights,
    which take a copy of the weights on a due step"""
    by: Literal["layer", "parameter"] = "layer"
    """one histogram for each layer (embedding, block, head), or for each parameter"""
    match: str = "*"
    """which weights: a glob over parameter names, or "re:..." for a regular expression"""
    bins: Annotated[int, Field(ge=2, le=512)] = 64
    """number of bins, of one width between the smallest and the largest value"""

    def build(self, model: MonitoredModel) -> Monitor:
        """Return a counter of values."""
        from .monitors.histograms import HistogramMonitor

        return HistogramMonitor(model, self)

    @property
    def copies_weights(self) -> bool:
        """Whether updates are measured."""
        return "updates" in self.of

    @property
    def measures_all(self) -> bool:
        """Whether the pattern leaves no weight out."""
        return self.match == "*"


AnyTracker = Annotated[TrackerConfig, Named(trackers)]
"""any tracker's table; outside `Metrics`, whose field has the name of the registry"""
AnyMonitor = Annotated[MonitorConfig, Named(monitors)]


class Metrics(Table):
    """What is measured and where it goes."""

    interval: Count = 10
    """optimizer steps between rows of metrics.jsonl"""
    tensorboard: bool = False
    """also write TensorBoard event files (extra `[tensorboard]`)"""
    trackers: list[AnyTracker] = []
    """more places that get every row"""
    monitors: list[AnyMonitor] = []
    """numbers of training at an interval; a step at which one is due has a row of metrics.jsonl"""
