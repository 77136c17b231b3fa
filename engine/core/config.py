"""The base of every recipe table: strict, frozen, and closed to unknown keys."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import PydanticKnownError, core_schema

from .files import address_problem


class Table(BaseModel):
    """One table of a recipe. TOML types are taken as they are: `"3"` is not a number."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        validate_default=False,
        defer_build=True,  # a validator is built when first used, not for each class at start
        protected_namespaces=(),
    )


DEFAULTS: Any = Field(default={}, validate_default=True)
"""The default of a key that holds a table: what an empty table gives. No object is made, and no
validator built, before a recipe is validated."""


class Component(Table):
    """The table of a registered component. A subclass gives `name` a one-word `Literal`."""

    name: str
    """which registered component this is"""


# TOML integers have 64 bits; arithmetic on counts must not leave them.
Count = Annotated[int, Field(ge=1, le=2**53)]
CountOrZero = Annotated[int, Field(ge=0, le=2**53)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
# The length apart from the pattern: repeating the many letters of Unicode up to 64 times takes 7 ms
# to compile at each start.
SplitName = Annotated[str, Field(pattern=r"^\w[\w-]*$", max_length=64)]
# Not strict, because TOML has lists and a strict tuple refuses them.
Betas = Annotated[tuple[Decay, Decay], Field(strict=False)]


class RelativeToRecipe:
    """Marks a path that is read: a relative one starts at the folder of the file that wrote it.

    Given by `--set`, it starts at the working directory, as paths that are written always do
    (`run.dir`, `data.cache_dir`).

    Args:
        or_hub_id: an id of a model on the Hugging Face hub stays as it is.
    """

    def __init__(self, *, or_hub_id: bool = False) -> None:
        self.or_hub_id = or_hub_id


def _path(text: str) -> str:
    if problem := address_problem(text):
        raise ValueError(problem)
    return text


# Every key that holds a path has one of these types, so that an address is refused.
LocalPath = Annotated[str, AfterValidator(_path)]
RecipePath = Annotated[LocalPath, RelativeToRecipe()]
HubPath = Annotated[LocalPath, RelativeToRecipe(or_hub_id=True)]


class OneOf:
    """Pydantic annotation of a text: one of some names, looked up when a recipe is validated.

    Args:
        names: the names, such as a registry's, which plugins may add to.
        more: further words that are allowed; they come first in lists.
    """

    def __init__(self, names: Iterable[str], *more: str) -> None:
        self.names = names
        self.more = more

    def words(self) -> list[str]:
        """Return all words that are allowed now."""
        return [*self.more, *self.names]

    def validate(self, value: Any) -> str:
        """Return the word, or raise pydantic's own error of a `Literal`."""
        if isinstance(value, str) and (value in self.more or value in self.names):
            return value
        *others, last = map(repr, self.words())
        raise PydanticKnownError("literal_error", {"expected": f"{', '.join(others)} or {last}"})

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(self.validate)

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return {"enum": self.words(), "type": "string"}
