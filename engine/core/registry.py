"""Named components: a recipe's `name` picks a config class, which builds the real thing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from importlib import import_module
from importlib.metadata import EntryPoint
from typing import TYPE_CHECKING, Any, Generic, TypeVar, get_args

from pydantic import BaseModel, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import PydanticCustomError, core_schema

from .errors import EnvironmentFault
from .extras import install_command

if TYPE_CHECKING:
    from ...model_zoo.config import ModelConfig

Config = TypeVar("Config", bound=BaseModel)
ROOT = __name__.removesuffix(".engine.core.registry")


class Registry(Generic[Config]):
    """Components of one kind by name: our own, those of plugins, and those of installed packages.

    Names are known at once; a component's module is imported when a recipe first names it, so that
    a start does not become slower with each component that is added.

    A package offers a component by an entry point of group `trainer.KIND`: its name is the
    component's, its value the config class.

    Args:
        kind: the word of `trainer list KIND`, and of the entry point group `trainer.KIND`.
        default: the name that a table without `name` means.
        built_in: our own components, name -> `module:Class`, the module below the package
            `trainer`.
        unsupported: names that are known elsewhere and not here -> why, as the end of a sentence
            with `{task}` for the name of the recipe's task.
    """

    def __init__(
        self,
        kind: str,
        default: str,
        built_in: Mapping[str, str] | None = None,
        unsupported: Mapping[str, str] | None = None,
    ) -> None:
        self.kind = kind
        self.default = default
        self.unsupported = unsupported or {}
        self._places = {name: f"{ROOT}.{place}" for name, place in (built_in or {}).items()}
        self._configs: dict[str, type[Config]] = {}

    def register(self, config: type[Config]) -> type[Config]:
        """Add a config class whose `name` field is a one-word `Literal`; usable as a decorator."""
        field = config.model_fields.get("name")
        words = get_args(field.annotation) if field else ()
        if len(words) != 1 or not isinstance(words[0], str):
            raise TypeError(f"{config.__name__}.name must be a Literal of one word")
        place = f"{config.__module__}:{config.__qualname__}"
        # One name for two classes is refused: a recipe would get the one that is imported first.
        known = self._places.setdefault(words[0], place)
        if known != place or self._configs.setdefault(words[0], config) is not config:
            raise ValueError(
                f"{self.kind} {words[0]!r} is registered twice: "
                f"{known.replace(':', '.')} and {place.replace(':', '.')}"
            )
        return config

    def __getitem__(self, name: str) -> type[Config]:
        if name not in self._configs:
            if name in self._places:
                module, _, attribute = self._places[name].partition(":")
                self.register(getattr(import_module(module), attribute))
            else:
                self._load(self._installed[name])
        return self._configs[name]

    def __contains__(self, name: object) -> bool:
        return name in self._places or name in self._installed

    def __iter__(self) -> Iterator[str]:
        return iter(sorted({*self._places, *self._installed}))

    def owners(self, key: str) -> list[str]:
        """Return the components that have a field `key`; of packages, those imported so far."""
        return [name for name in self._places if key in self[name].model_fields]

    @cached_property
    def _installed(self) -> dict[str, EntryPoint]:
        from importlib.metadata import entry_points  # slow, and needed for foreign names alone

        return {entry.name: entry for entry in entry_points(group=f"trainer.{self.kind}")}

    def _load(self, entry: EntryPoint) -> None:
        try:
            self.register(entry.load())
            if entry.name not in self._configs:
                raise TypeError(f"{entry.value} is not named {entry.name!r}")
        except (Exception, SystemExit) as error:
            package = entry.dist.name if entry.dist else "an installed package"
            reason = f"{type(error).__name__}: {error}"
            raise EnvironmentFault(
                f"the {self.kind} {entry.name!r} of {package} cannot be used: {reason}",
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
        if (
            isinstance(name, str)
            and name not in self.registry
            and (reason := self.registry.unsupported.get(name))
        ):
            context = {"kind": self.registry.kind, "name": name, "reason": reason}
            raise PydanticCustomError("unsupported_component", '{kind} "{name}" {reason}', context)
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
            self.registry[name].model_rebuild()  # its schema may not be built yet
            option = handler(self.registry[name].__pydantic_core_schema__)
            if name != self.registry.default:
                option = handler.resolve_ref_schema(option)
                option["required"] = ["name", *option.get("required", [])]
            options.append(option)
        return {"oneOf": options}


models: Registry[ModelConfig] = Registry(
    "model",
    default="llama3",
    built_in={
        "llama3": "model_zoo.llama3.config:Llama3Config",
        "deepseek_v3": "model_zoo.deepseek_v3.config:DeepSeekV3Config",
        "gemma2": "model_zoo.gemma2.config:Gemma2Config",
        "gemma3": "model_zoo.gemma3.config:Gemma3Config",
        "gpt_oss": "model_zoo.gpt_oss.config:GptOssConfig",
        "llama4": "model_zoo.llama4.config:Llama4Config",
        "mistral": "model_zoo.mistral.config:MistralConfig",
        "mixtral": "model_zoo.mixtral.config:MixtralConfig",
        "olmo2": "model_zoo.olmo2.config:Olmo2Config",
        "phi3": "model_zoo.phi3.config:Phi3Config",
        "qwen2": "model_zoo.qwen2.config:Qwen2Config",
        "qwen3": "model_zoo.qwen3.config:Qwen3Config",
    },
)


def require_package(module: str, user: str, extra: str) -> Any:
    """Import a package that only some runs need.

    Args:
        module: the module to import, such as "pyarrow.parquet".
        user: the part that needs it, for the message, such as "a chat template".
        extra: the extra of our package that installs it.

    Raises:
        EnvironmentFault: the package is not installed.
    """
    try:
        return import_module(module)
    except ImportError as error:
        raise EnvironmentFault(
            f"{user} needs the {module.partition('.')[0]} package",
            install_command(extra),
        ) from error
