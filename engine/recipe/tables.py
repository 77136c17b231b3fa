"""The tables of a recipe that no component owns: `[run]`, and `[plugins]` with those of plugins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, TypeVar

from pydantic import Field, GetCoreSchemaHandler, GetJsonSchemaHandler, create_model
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import core_schema

from ..core.config import DEFAULTS, Count, CountOrZero, LocalPath, RecipePath, Table


class Run(Table):
    """What is run, for how long, and where it is kept."""

    name: str = ""
    """default: the recipe file's stem"""
    dir: LocalPath = "runs"
    """the run directory is {dir}/{name}"""
    steps: Count | None = None
    """optimizer steps; or give epochs"""
    epochs: Annotated[float, Field(gt=0, le=1e9)] | None = None
    """passes over the training sources; or give steps"""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """seeds the initial weights and the order of the data"""
    deterministic: bool = False
    """only use operations that give the same bits each time (slower on GPUs)"""
    resume: LocalPath = "auto"
    """"auto": the newest intact checkpoint, else start; "never"; or a checkpoint's path"""
    init_from: RecipePath = ""
    """weights only, from a native checkpoint or a Hugging Face folder; resume wins over it"""
    gc_interval: CountOrZero = 50
    """Python garbage collection every N steps on all ranks together; 0 leaves Python alone"""


class Plugins(Table):
    """Code that adds components."""

    modules: Annotated[list[str], Field(max_length=100)] = []
    """Python modules imported before validation, so that they can register components"""


class PluginsWithTables(Plugins, extra="allow"):
    """`[plugins]` with the tables that plugins have registered, as attributes."""


PluginTable = TypeVar("PluginTable", bound=type[Table])
_tables: dict[str, type[Table]] = {}


def register_table(name: str) -> Callable[[PluginTable], PluginTable]:
    """Return a decorator that makes a class the table `[plugins.NAME]` of a recipe.

    A field of this class in a component of the plugin is filled from that table.
    """

    def register(config: PluginTable) -> PluginTable:
        if name in Plugins.model_fields or _tables.setdefault(name, config) is not config:
            raise ValueError(f"the table [plugins.{name}] is registered twice")
        return config

    return register


class RegisteredTables:
    """Pydantic annotation: validates `[plugins]` with the tables that plugins have registered."""

    def table(self) -> type[Plugins]:
        """Return the class of `[plugins]` at this moment."""
        fields: dict[str, Any] = {name: (config, DEFAULTS) for name, config in _tables.items()}
        if not fields:
            return Plugins
        return create_model("Plugins", __base__=Plugins, __doc__=Plugins.__doc__, **fields)

    def validate(self, value: Any) -> Any:
        """Return the table with the tables of plugins; without any, return the value unchanged."""
        if not _tables or not isinstance(value, dict):
            return value
        checked = self.table().model_validate(value)
        # An object of a class that is made here could not be sent to other processes.
        return PluginsWithTables.model_construct(**dict(checked))

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        return core_schema.no_info_before_validator_function(
            self.validate,
            handler(source),
            serialization=core_schema.plain_serializer_function_ser_schema(
                lambda plugins: plugins.model_dump()
            ),
        )

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        if not _tables:
            return handler(schema)
        table = self.table()
        table.model_rebuild()
        return handler(table.__pydantic_core_schema__)
