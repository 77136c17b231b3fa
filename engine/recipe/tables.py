"""The tables of a recipe that no component owns."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from ..core.config import Count, CountOrZero, LocalPath, RecipePath, Table


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
