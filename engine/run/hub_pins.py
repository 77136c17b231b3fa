"""Pins the hub's models that a recipe names to commits, which a run records. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from operator import attrgetter

from ..core.errors import RecipeError
from ..core.run_dir import RunDirectory
from ..download.hub import MODEL_FILES, TOKENIZER_FILES, download
from ..download.hub_ids import HubId, parse_hub_id
from ..recipe.layers import read_layers
from ..recipe.schema import Recipe


def pin_hub_ids(recipe: Recipe) -> Recipe:
    """Download the hub's models that a recipe names, and return it with the commits in their ids.

    A run that resumes keeps the commits of its recorded recipe.

    Raises:
        EnvironmentFault, DataError: a model cannot be downloaded; see `download`.
    """
    recorded = RunDirectory(recipe.run.folder).recipe
    before = {}
    with suppress(RecipeError):  # of a new run there is none
        before = read_layers(recorded).values
    for table, key, wanted in list_hub_ids(recipe):
        kept = before.get(table, {})
        kept = parse_hub_id(str(kept.get(key, "")) if isinstance(kept, dict) else "")
        if kept and kept.is_pinned and kept.repo == wanted.repo and not wanted.revision:
            wanted = kept
        patterns = TOKENIZER_FILES if table == "tokenizer" else MODEL_FILES
        pinned = str(download(wanted, patterns).id)
        changed = getattr(recipe, table).model_copy(update={key: pinned})
        recipe = recipe.model_copy(update={table: changed})
    return recipe


def list_hub_ids(recipe: Recipe) -> Iterator[tuple[str, str, HubId]]:
    """Yield table, key and id of each of the hub's models that a recipe names."""
    keys = ["run.init_from", "lora.init_from", "tokenizer.path"]
    if recipe.task.frozen_key:
        keys.append(f"task.{recipe.task.frozen_key}")
    for place in keys:
        value, (table, _, key) = "", place.partition(".")
        with suppress(AttributeError):  # not every tokenizer has a path
            value = attrgetter(place)(recipe)
        if value and (found := parse_hub_id(str(value))):
            yield table, key, found
