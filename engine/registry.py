"""Named components: a recipe's `name` picks a config class, which builds the real thing."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, Generic, TypeVar, get_args

from pydantic import BaseModel, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import PydanticCustomError, core_schema

from .errors import Problem, RecipeError, nearest

Config = TypeVar("Config", bound=BaseModel)


class Registry(Generic[Config]):
    """Components of one kind by name.

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
        return self._configs[name]

    def __contains__(self, name: object) -> bool:
        return name in self._configs

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._configs))


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
            hint = nearest(str(name), self.registry)
            raise PydanticCustomError(
                "unknown_component",
                'no {kind} is named "{name}"; known: {known}',
                {
                    "kind": self.registry.kind,
                    "name": str(name)[:80],
                    "known": ", ".join(self.registry),
                    "hint": hint,
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
            options.append(option)
        return {"oneOf": options}


def load_plugins(registries: list[Registry[Any]], modules: list[str]) -> None:
    """Import what registers components: installed entry points, then `[plugins] modules`.

    Raises:
        RecipeError: a module that cannot be imported, with the reason.
    """
    for registry in registries:
        for entry in entry_points(group=f"trainer.{registry.kind}"):
            registry.register(entry.load())
    for index, module in enumerate(modules):
        try:
            import_module(module)
        except Exception as error:
            raise RecipeError(
                [
                    Problem(
                        f"cannot import {module!r}: {type(error).__name__}: {error}",
                        key=f"plugins.modules.{index}",
                    )
                ]
            ) from error
