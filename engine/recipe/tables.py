"""The tables of a recipe that no component owns: `[run]`, and `[plugins]` with those of plugins."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, GetCoreSchemaHandler, GetJsonSchemaHandler, create_model
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import core_schema

from ..core.config import DEFAULTS, Count, CountOrZero, HubPath, LocalPath, Table


class InitRename(Table):
    """What a weight of `run.init_from` is called here."""

    match: Annotated[str, Field(min_length=1, max_length=1000)]
    """names in the checkpoint or folder: a glob, or "re:" and an expression of whole names"""
    to: Annotated[str, Field(min_length=1, max_length=1000)]
    """the name here; each * is what a * of the glob matched, and \\1 a group of the expression"""


class Init(Table):
    """What is taken of `run.init_from`."""

    weights: Literal["model", "ema"] = "model"
    """"ema": the averaged weights that [ema] keeps; weights without an average are the model's"""
    exclude: Annotated[list[str], Field(max_length=1000)] = []
    """weights that keep their initial values: globs or "re:" expressions over the names here"""
    rename: Annotated[list[InitRename], Field(max_length=1000)] = []
    """names that differ; the first entry that matches wins"""


class Run(Table):
    """What is run, for how long, and where it is kept."""

    name: str = ""
    """default: the recipe file's stem"""
    dir: LocalPath = "runs"
    """the run directory is {dir}/{experiment}/{lineage}/{name}"""
    experiment: str = ""
    """what is studied: a folder for the runs of it; empty: no such folder"""
    lineage: str = ""
    """a line of runs inside the experiment, each made from the one before; empty: no such folder"""
    steps: Count | None = None
    """optimizer steps; or give epochs"""
    epochs: Annotated[float, Field(gt=0, le=1e9)] | None = None
    """passes over the training sources; or give steps"""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """seeds the initial weights and the order of the data"""
    deterministic: bool = False
    """only use operations that give the same bits each time (slower on GPUs)"""
    resume: LocalPath = "auto"
    """"auto": the newest intact checkpoint, else start; "never"; or the path of a checkpoint, from
    which the run starts once: with the same recipe, later starts continue from the run's own"""
    init_from: HubPath = ""
    """weights only, from a native checkpoint, a Hugging Face folder, a folder of torchtitan's, or a
    model of the Hugging Face hub, such as "Qwen/Qwen3-0.6B@REVISION"; resume wins over it"""
    init: Init = DEFAULTS
    """what is taken of init_from"""
    gc_interval: CountOrZero = 50
    """Python garbage collection every N steps on all ranks together; 0 leaves Python alone"""

    @property
    def folder(self) -> Path:
        """The run directory."""
        return Path(self.dir, self.experiment, self.lineage, self.name)


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
