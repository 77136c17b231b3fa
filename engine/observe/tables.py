"""The recipe's `[metrics]` and `[profile]` tables, and the registry of trackers. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol

from pydantic import Field

from ..core.config import Component, Count, CountOrZero, Table
from ..core.registry import Named, Registry

if TYPE_CHECKING:
    import torch

    from .phases import PhaseTimer
    from .profiler import Profiler


class Tracker(Protocol):
    """A service or file that gets metric rows; only rank 0 has one."""

    def log(self, row: Mapping[str, Any]) -> None:
        """Send one row of metrics.jsonl (`kind`, `step` and numbers)."""

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
    """a server or a folder; default: MLFLOW_TRACKING_URI, else {run.dir}/mlruns"""
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
    """which ranks write traces to {dir}/{name}/profiles"""

    def build(
        self,
        phases: PhaseTimer,
        folder: Path,
        *,
        rank: int,
        is_main: bool,
        device: torch.device,
        flops_per_step: float,
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


AnyTracker = Annotated[TrackerConfig, Named(trackers)]
"""any tracker's table; outside `Metrics`, whose field has the name of the registry"""


class Metrics(Table):
    """What is measured and where it goes."""

    interval: Count = 10
    """optimizer steps between rows of metrics.jsonl"""
    tensorboard: bool = False
    """also write TensorBoard event files (extra `[tensorboard]`)"""
    trackers: list[AnyTracker] = []
    """more places that get every row"""
