"""Named components: a recipe's `name` picks a config class, which builds the real thing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, TypeVar, get_args

from pydantic import BaseModel, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import PydanticCustomError, core_schema

from .errors import EnvironmentFault, Problem, RecipeError

Config = TypeVar("Config", bound=BaseModel)


class Registry(Generic[Config]):
    """Components of one kind by name: our own, and those of installed packages.

    A package offers a component by an entry point of group `trainer.KIND`: its name is the
    component's, its value the config class. It is imported when a recipe first names it.

    Args:
        kind: the word of `trainer list KIND`, and of the entry point group `trainer.KIND`.
        default: the name that a table without `name` means.
    """

    def __init__(self, kind: str, default: str) -> None:
        self.kind = kind
        self.default = default
        self._configs: dict[str, type[Config]] = {}

    def register(self, config: type[Config]) -> type[Config]:
        """Add a config class whose `name` field is a one-word `Literal`; usable as a decorator."""
        field = config.model_fields.get("name")
        words = get_args(field.annotation) if field else ()
        if len(words) != 1 or not isinstance(words[0], str):
            raise TypeError(f"{config.__name__}.name must be a Literal of one word")
        known = self._configs.setdefault(words[0], config)
        if known is not config:
            raise ValueError(
                f"{self.kind} {words[0]!r} is registered twice: "
                f"{known.__module__}.{known.__qualname__} and "
                f"{config.__module__}.{config.__qualname__}"
            )
        return config

    def __getitem__(self, name: str) -> type[Config]:
        if name not in self._configs:
            self._import(self._installed[name])
        return self._configs[name]

    def __contains__(self, name: object) -> bool:
        return name in self._configs or name in self._installed

    def __iter__(self) -> Iterator[str]:
        return iter(sorted({*self._configs, *self._installed}))

    def owners(self, key: str) -> list[str]:
        """Return the components, of those imported so far, that have a field `key`."""
        return [name for name, config in self._configs.items() if key in config.model_fields]

    @cached_property
    def _installed(self) -> dict[str, EntryPoint]:
        return {entry.name: entry for entry in entry_points(group=f"trainer.{self.kind}")}

    def _import(self, entry: EntryPoint) -> None:
        try:
            self.register(entry.load())
            if entry.name not in self._configs:
                raise TypeError(f"{entry.value} is not named {entry.name!r}")
        except (Exception, SystemExit) as error:
            package = entry.dist.name if entry.dist else "an installed package"
            raise EnvironmentFault(
                f"the {self.kind} {entry.name!r} of {package} cannot be used: {_reason(error)}",
                f"repair or remove {package}",
            ) from error


class Named:
    """Pydantic annotation: validate a table by the config class that its `name` picks."""

    def __init__(self, registry: Registry[Any]) -> None:
        self.registry = registry

    def validate(self, value: Any) -> Any:
        """Return the config object of a table (a dict), or pass a finished one through."""
        if isinstance(value, BaseModel):
            return value
        if not isinstance(value, dict):
            raise PydanticCustomError("table_type", "expected a table")
        name = value.get("name", self.registry.default)
        if not isinstance(name, str) or name not in self.registry:
            raise PydanticCustomError(
                "unknown_component",
                'no {kind} is named "{name}"; known: {known}',
                {
                    "kind": self.registry.kind,
                    "name": str(name)[:80],
                    "known": ", ".join(self.registry),
                },
            )
        # Errors of the inner model keep their own locations below this field's.
        return self.registry[name].model_validate({**value, "name": name})

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(
            self.validate,
            serialization=core_schema.plain_serializer_function_ser_schema(
                lambda config: config.model_dump()
            ),
        )

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        options = []
        for name in self.registry:
            option = handler(self.registry[name].__pydantic_core_schema__)
            if name != self.registry.default:
                option = handler.resolve_ref_schema(option)
                option["required"] = ["name", *option.get("required", [])]
            options.append(option)
        return {"oneOf": options}


def import_plugins(modules: Sequence[str]) -> list[tuple[str, str]]:
    """Import the modules that register components; return those that cannot be, and why."""
    broken = []
    for module in modules:
        try:
            import_module(module)
        except (Exception, SystemExit) as error:
            broken.append((module, f"cannot import {module!r}: {_reason(error)}"))
    return broken


def require_plugins(modules: Sequence[str]) -> None:
    """Import the modules that `--plugin` names.

    Raises:
        RecipeError: those that cannot be imported, and why.
    """
    broken = import_plugins(modules)
    if broken:
        raise RecipeError([Problem(message, "--plugin") for _, message in broken])


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
