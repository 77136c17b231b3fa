"""What every optimizer and every schedule has in a recipe, and their registries."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple, Self

from pydantic import Field, model_validator

from ..core.config import Betas, Component, CountOrZero, Decay, Table
from ..core.registry import Registry
from .library.table import (
    OPTIMIZERS,
    PREFIX,
    SCHEDULES,
    UNSUPPORTED_OPTIMIZERS,
    UNSUPPORTED_SCHEDULES,
)

if TYPE_CHECKING:
    import torch

PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]

StateDtype = Literal["fp32", "bf16", "int8"]
LONGEST_BF16 = 0.99
"""decay above which a running mean in bf16, which has 8 bits, hardly changes any more"""

SCALED = ("lr", "weight_decay")
"""keys whose value a parameter group can give as a multiple of the optimizer's value"""


class Rates(NamedTuple):
    """The values that a parameter group can multiply; see `SCALED`."""

    lr: float
    weight_decay: float


class ParameterGroup(Table):
    """Parameters whose names match get their own values; the first matching group wins."""

    match: str
    """glob over parameter names, or `re:` and a regular expression"""
    lr: NonNegativeFloat | None = None
    """peak learning rate of these parameters"""
    lr_scale: NonNegativeFloat | None = None
    """multiplies `optimizer.lr` for these parameters, in place of `lr`"""
    weight_decay: NonNegativeFloat | None = None
    """weight decay of these parameters"""
    weight_decay_scale: NonNegativeFloat | None = None
    """multiplies `optimizer.weight_decay` for these parameters, in place of `weight_decay`"""
    betas: Betas | None = None
    """betas of these parameters"""
    eps: PositiveFloat | None = None
    """epsilon of these parameters"""
    momentum: NonNegativeFloat | None = None
    """momentum of these parameters"""

    @model_validator(mode="after")
    def _check_scales(self) -> Self:
        for key in SCALED:
            if getattr(self, key) is not None and getattr(self, f"{key}_scale") is not None:
                raise ValueError(f"{key} and {key}_scale both set the same value: give one")
        return self

    def overrides(self, rates: Rates) -> dict[str, Any]:
        """Return the values that this group sets, with scales multiplied by `rates`."""
        found = self.model_dump(exclude={"match"}, exclude_none=True)
        for key in SCALED:
            scale = found.pop(f"{key}_scale", None)
            if scale is not None:
                found[key] = getattr(rates, key) * scale
        return found


class OptimizerConfig(Component):
    """Base of every optimizer's table."""

    group_keys: ClassVar[frozenset[str]] = frozenset({"lr", "weight_decay"})
    """which keys of a `[[optimizer.groups]]` entry this optimizer understands"""
    averages_weights: ClassVar[bool] = False
    """whether the optimizer trains other weights than those that are evaluated and exported"""
    needs_matrices: ClassVar[bool] = False
    """whether it updates matrices as wholes: its groups then have `placements` and `is_matrix`, and
    it cannot step one weight at a time"""
    has_owned_state: ClassVar[bool] = False
    """whether a rank has all of the state of some matrices, and none of the others'"""
    bounds_scores: ClassVar[bool] = False
    """whether it reads the largest attention scores of a step, which then are measured"""
    matrix_keys: ClassVar[frozenset[str]] = frozenset()
    """which of `group_keys` say something of matrices alone"""
    keys_of_both: ClassVar[frozenset[str]] = frozenset({"lr", "weight_decay"})
    """which of `group_keys` say something of matrices and of other parameters"""

    lr: NonNegativeFloat = 3e-4
    """peak learning rate; the schedule multiplies it"""
    weight_decay: NonNegativeFloat = 0.1
    """decoupled weight decay"""
    clip_norm: NonNegativeFloat = 1.0
    """largest global gradient norm; 0 does not clip"""
    clip_value: NonNegativeFloat = 0.0
    """largest absolute value of an element of a gradient, after `clip_norm`; 0 does not clip"""
    groups: list[ParameterGroup] = []
    """other values for parameters chosen by name"""

    @property
    def updates_heads(self) -> bool:
        """Whether the rows of each attention head are a matrix of their own."""
        return False

    def rates_of(self, *, is_matrix: bool) -> Rates:
        """Return the rate and the decay of matrices, or of all other parameters."""
        return Rates(self.lr, self.weight_decay)

    def named_rates(self) -> dict[str, float]:
        """Return the peak rates beside `lr` that rows of metrics show, by key."""
        rates = self.rates_of(is_matrix=True)
        values = [group.overrides(rates).get("lr") for group in self.groups]
        return {f"lr_group_{n}": rate for n, rate in enumerate(values) if rate is not None}

    @property
    def has_state_in_int8(self) -> bool:
        """Whether the state is in 8 bits, with a scale for each block."""
        return getattr(self, "state_dtype", "fp32") == "int8"

    def for_gpu(self) -> Self:
        """Return the table with what its "auto" means on a GPU."""
        return self

    def warnings(self) -> Iterator[str]:
        """Yield what is likely to be a mistake."""
        yield from ()

    def build(
        self, groups: Sequence[dict[str, Any]], device: torch.device
    ) -> torch.optim.Optimizer:
        """Return the optimizer over torch parameter groups (each with its `lr` and overrides)."""
        raise NotImplementedError


def warn_of_slow_means(dtype: StateDtype, decays: Sequence[float]) -> Iterator[str]:
    """Yield a warning if running means decay by less than bf16 can tell."""
    slowest = max(decays)
    if dtype == "bf16" and slowest > LONGEST_BF16:
        yield (
            'optimizer.state_dtype = "bf16" hardly changes a running mean with a decay of '
            f'{slowest:g}: take at most {LONGEST_BF16:g}, or "int8" or "fp32"'
        )


optimizers: Registry[OptimizerConfig] = Registry(
    "optimizer",
    default="adamw",
    built_in={
        "adamw": "engine.optim.optimizers:AdamW",
        "adam": "engine.optim.optimizers:Adam",
        "sgd": "engine.optim.optimizers:SGD",
        "adamh": "engine.optim.matrix.tables:AdamH",
        "adopt": "engine.optim.elementwise.tables:ADOPT",
        "qhadopt": "engine.optim.elementwise.tables:QHADOPT",
        "qhadam": "engine.optim.elementwise.tables:QHAdam",
        "lion": "engine.optim.elementwise.tables:Lion",
        "ademamix": "engine.optim.elementwise.tables:AdEMAMix",
        "mars": "engine.optim.elementwise.tables:MARS",
        "schedule_free": "engine.optim.elementwise.tables:ScheduleFree",
        "dion2": "engine.optim.matrix.tables:Dion2",
        "decoupled_adamw": "engine.optim.elementwise.tables:DecoupledAdamW",
        "decoupled_sgdw": "engine.optim.elementwise.tables:DecoupledSGDW",
        "adafactor": "engine.optim.factored.tables:Adafactor",
        **{f"{PREFIX}{name}": f"engine.optim.library.optimizers:{name}" for name in OPTIMIZERS},
        "muon": "engine.optim.matrix.tables:Muon",
        "muonclip": "engine.optim.matrix.tables:MuonClip",
        "muonh": "engine.optim.matrix.tables:MuonH",
        "normuon": "engine.optim.matrix.tables:NorMuon",
        "soap": "engine.optim.matrix.tables:SOAP",
        "soap_muon": "engine.optim.matrix.tables:SOAPMuon",
    },
    unsupported=UNSUPPORTED_OPTIMIZERS,
)


@dataclass
class ScheduleState:
    """What evaluations have changed of the learning rate, the same on all ranks.

    Attributes:
        ratio: multiplies the learning rate of every step.
        best: the best score; None before the first finite one.
        bad: evaluations without improvement since then or since the last reduction.
        cooldown: evaluations left that do not count as bad.
    """

    ratio: float = 1.0
    best: float | None = None
    bad: int = 0
    cooldown: int = 0


class ScheduleConfig(Component):
    """Base of every learning-rate schedule: a pure function of the step."""

    warmup_steps: CountOrZero = 0
    """steps over which the rate rises linearly from nearly 0 to its peak"""
    warmup_epochs: Annotated[float, Field(ge=0, le=1e9)] | None = None
    """the same in epochs, in place of warmup_steps"""
    momentum_warmup_steps: CountOrZero = 0
    """steps over which the momentum, or the first beta, rises linearly from `momentum_min`"""
    momentum_cooldown_steps: CountOrZero = 0
    """last steps of the run, over which it falls linearly to `momentum_min`"""
    momentum_min: Decay = 0.85
    """momentum at the first step of its warmup and at the last step of its cooldown"""

    def settle(self, steps_per_epoch: float, peak_lr: float) -> Self:
        """Return the schedule with its warmup in steps, for the peak rate `optimizer.lr`."""
        if self.warmup_epochs is None:
            return self
        steps = round(self.warmup_epochs * steps_per_epoch)
        return self.model_copy(update={"warmup_steps": steps})

    def lr_factor(self, step: int, total: int) -> float:
        """Return what the peak rate is multiplied by at `step` (0-based) of `total`."""
        if step < self.warmup_steps:
            # Never 0, so that the first step trains, and below 1: step `warmup_steps` has the peak.
            return (step + 1) / (self.warmup_steps + 1)
        return self.after_warmup(step - self.warmup_steps, max(1, total - self.warmup_steps))

    def after_warmup(self, step: int, total: int) -> float:
        """Return the factor at `step` of `total`, both counted from the end of the warmup."""
        raise NotImplementedError

    @property
    def changes_momentum(self) -> bool:
        """Whether the momentum of optimizers changes."""
        return self.momentum_warmup_steps > 0 or self.momentum_cooldown_steps > 0

    def momentum(self, step: int, total: int, own: float) -> float:
        """Return the momentum, or the first beta, of a parameter group at a step of the run.

        Args:
            step: finished optimizer steps.
            total: optimizer steps of the run.
            own: the value of the group in the recipe.
        """
        shares = [1.0]
        if self.momentum_warmup_steps:
            shares.append(step / self.momentum_warmup_steps)
        if self.momentum_cooldown_steps:  # the last step has the least momentum
            shares.append(max(0, total - 1 - step) / self.momentum_cooldown_steps)
        low = min(self.momentum_min, own)
        return low + min(shares) * (own - low)

    def after_evaluation(
        self, state: ScheduleState, step: int, score: float, *, maximize: bool
    ) -> None:
        """Update what multiplies the rates of the next steps; called where `follows_score`.

        Args:
            state: changed in place; checkpoints keep it.
            step: finished optimizer steps.
            score: value of `evaluate.metric`, the same on all ranks.
            maximize: whether a higher score is better.
        """

    depends_on_total: ClassVar[bool] = True
    """whether a longer run changes the factors of the steps before"""
    follows_score: ClassVar[bool] = False
    """whether evaluations change the rate, and so what is trained"""


schedules: Registry[ScheduleConfig] = Registry(
    "schedule",
    default="wsd",
    built_in={
        "wsd": "engine.optim.schedules:WSD",
        "cosine": "engine.optim.schedules:Cosine",
        "linear": "engine.optim.schedules:LinearSchedule",
        "constant": "engine.optim.schedules:ConstantSchedule",
        "inverse_sqrt": "engine.optim.schedules:InverseSqrt",
        "exponential": "engine.optim.schedules:Exponential",
        "polynomial": "engine.optim.schedules:Polynomial",
        "scaled": "engine.optim.schedules:Scaled",
        "plateau": "engine.optim.plateau:Plateau",
        **{f"{PREFIX}{name}": f"engine.optim.library.schedules:{name}" for name in SCHEDULES},
    },
    unsupported=UNSUPPORTED_SCHEDULES,
)
