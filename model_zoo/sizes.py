"""Closed tables of sizes, and the error of sizes that cannot be. Torch-free."""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

Size = Annotated[int, Field(ge=1, le=2**31)]
PositiveFloat = Annotated[float, Field(gt=0)]


class Sizes(BaseModel):
    """A closed, frozen table of sizes; TOML types are taken as they are."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        defer_build=True,  # a validator is built when first used
        protected_namespaces=(),
    )


class SettingsError(ValueError):
    """Raised for settings that no model of the family can have.

    Args:
        problems: one sentence for each such setting.
    """

    def __init__(self, problems: list[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


def quote(value: Any) -> str:
    """Return a value of someone else's file as JSON, cut to a length that can be printed."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 80 else text[:77] + "..."
