"""The table of torch's optimizers and schedules, by which recipes are checked. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

Keys = Mapping[str, Mapping[str, Any]]
"""key -> its type, default and words"""
PREFIX = "torch."

_CLASSES: dict[str, dict[str, Keys]] = json.loads(
    Path(__file__).with_name("torch.json").read_text("utf-8")
)
OPTIMIZERS = _CLASSES["optimizers"]
"""classes of torch.optim; `python -m tests.optim.torch_table` writes the file"""
SCHEDULES = _CLASSES["schedules"]
"""classes of torch.optim.lr_scheduler"""

_FUNCTION = "takes a function, which a recipe cannot write: register a schedule in a plugin"
_SCHEDULES = "takes other schedules as its arguments, which a recipe cannot write"
UNSUPPORTED_OPTIMIZERS = {
    "torch.LBFGS": "evaluates the loss several times in a step, and a training step does it once",
    "torch.SparseAdam": "updates sparse gradients alone, and those of models here are dense",
    "torch.Adafactor": 'is "adafactor" here, with the same rules and defaults',
    "torch.Muon": "updates matrices alone, and a model has other parameters too",
}
"""optimizers of torch that a recipe cannot name -> the end of a sentence that says why"""
UNSUPPORTED_SCHEDULES = {
    "torch.LambdaLR": _FUNCTION,
    "torch.MultiplicativeLR": _FUNCTION,
    "torch.ChainedScheduler": _SCHEDULES,
    "torch.SequentialLR": _SCHEDULES,
    "torch.ReduceLROnPlateau": 'is "plateau" here, with the same rules and defaults',
}
"""schedules of torch that a recipe cannot name -> the end of a sentence that says why"""

DESCRIPTIONS = {
    "T_0": "steps until the first restart",
    "T_max": "steps until the rate is at its least; default: those of the run",
    "T_mult": "multiplies the steps until the next restart, after each restart",
    "alpha": "decay of the running mean of squares, or power of the decay of the rate (ASGD)",
    "amsgrad": "divide by the largest mean of squares so far",
    "anneal_strategy": "shape of the rise and of the fall",
    "base_lr": "least rate, as a value of `optimizer.lr`",
    "base_momentum": "least momentum, at the highest rate",
    "betas": "decay of the running means of the gradient and of its square",
    "centered": "divide by an estimate of the variance instead of the mean of squares",
    "cycle_momentum": "move the momentum, or the first beta, against the rate",
    "dampening": "share of a gradient that does not enter the momentum",
    "decoupled_weight_decay": "decay weights directly instead of in the gradient",
    "div_factor": "highest rate divided by the first one",
    "end_factor": "factor of the rate at the end",
    "eps": "added to the denominator",
    "eta_min": "least rate, as a value of `optimizer.lr`",
    "etas": "factors that make a step size smaller and larger",
    "factor": "factor of the rate in the first `total_iters` steps",
    "final_div_factor": "first rate divided by the last one",
    "gamma": "factor of the rate, at each step or at each change",
    "initial_accumulator_value": "first value of the sum of squares",
    "lambd": "decay of the averaged weights",
    "lr": "peak learning rate; the schedule multiplies it",
    "lr_decay": "decay of the learning rate with each step",
    "max_lr": "highest rate, as a value of `optimizer.lr`; default: `optimizer.lr`",
    "max_momentum": "highest momentum, at the lowest rate",
    "milestones": "steps at which the rate changes",
    "mode": "shape of a cycle",
    "momentum": "decay of the running mean of the gradient",
    "momentum_decay": "decay of the momentum",
    "nesterov": "look ahead along the momentum",
    "pct_start": "share of the steps in which the rate rises",
    "power": "exponent of the fall",
    "rho": "decay of the running means of squares",
    "start_factor": "factor of the rate at the first step",
    "step_size": "steps between changes of the rate",
    "step_size_down": "steps of the falling half of a cycle; default: `step_size_up`",
    "step_size_up": "steps of the rising half of a cycle",
    "step_sizes": "least and largest step size",
    "t0": "step from which weights are averaged",
    "three_phase": "fall in two phases",
    "total_iters": "steps until the factor stays as it is",
    "total_steps": "steps until the lowest rate; default: those of the run",
    "weight_decay": "weight decay, as this optimizer of torch applies it",
}
"""key -> what it is"""

_TYPES: dict[str, Any] = {"bool": bool, "int": int, "float": float, "ints": list[int]}
_AT_LEAST_0 = {
    "alpha", "eps", "eta_min", "lambd", "lr", "lr_decay", "momentum", "weight_decay", "t0", "gamma",
    "initial_accumulator_value", "momentum_decay", "base_lr", "max_lr", "power", "factor",
    "start_factor", "end_factor",
}  # fmt: skip
_SHARES = {"rho", "pct_start", "base_momentum", "max_momentum"}
_POSITIVE = {
    "T_0", "T_max", "T_mult", "step_size", "step_size_up", "step_size_down", "total_steps",
    "total_iters", "div_factor", "final_div_factor",
}  # fmt: skip
_DECAYS = Annotated[float, Field(ge=0, lt=1)]


def make_fields(keys: Keys) -> dict[str, tuple[Any, Any]]:
    """Return the fields of a table, as `pydantic.create_model` takes them."""
    return {key: (_type(key, row), _default(key, row)) for key, row in keys.items()}


def _default(key: str, row: Mapping[str, Any]) -> Any:
    value = row.get("default", ...)
    if isinstance(value, list):
        value = tuple(map(float, value))
    elif row.get("type") == "float" and isinstance(value, int):
        value = float(value)
    return Field(value, description=DESCRIPTIONS[key])


def _type(key: str, row: Mapping[str, Any]) -> Any:
    if "words" in row:
        return Literal[tuple(row["words"])]
    if row["type"] == "pair":
        item = _DECAYS if key == "betas" else Annotated[float, Field(ge=0)]
        pair: Any = tuple[item, item]  # type: ignore[valid-type]  # made when a recipe names it
        return Annotated[pair, Field(strict=False)]
    found: Any = _TYPES[row["type"]]
    if key in _AT_LEAST_0:
        found = Annotated[found, Field(ge=0)]
    elif key in _SHARES:
        found = Annotated[found, Field(ge=0, le=1)]
    elif key in _POSITIVE:
        found = Annotated[found, Field(gt=0, le=2**53)]
    return found | None if row.get("optional") else found
