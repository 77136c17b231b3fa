"""Finds the files and models that a recipe names and this machine lacks. Torch-free."""

from __future__ import annotations

import os
from glob import glob, has_magic

from ..core.errors import Problem
from ..download.hub import MODEL_FILES, TOKENIZER_FILES, is_cached
from ..download.hub_ids import parse_hub_id
from .load import Loaded
from .structure import given_tables, slot


def find_missing_assets(loaded: Loaded, *, offline: bool = False) -> list[Problem]:
    """Return each file, folder or glob that a recipe reads and that this machine does not have.

    Args:
        loaded: a checked recipe.
        offline: models of the Hugging Face hub must be in the cache too.

    Raises:
        EnvironmentFault: the hub's library is needed, and not installed.
    """
    problems, tree = [], loaded.tree
    for table in given_tables(tree.values):
        for key, field in table.config.model_fields.items():
            value, place = table.values.get(key), (*table.path, key)
            if not (slot(field).is_path and isinstance(value, str) and value):
                continue
            wanted = parse_hub_id(value) if slot(field).or_hub_id else None
            if wanted:
                files = TOKENIZER_FILES if table.path[0] == "tokenizer" else MODEL_FILES
                if offline and not is_cached(wanted, files):
                    hint = f"`trainer download {wanted}` downloads it"
                    problems.append(tree.problem(place, f"{wanted} is not in the cache", hint))
            elif not (os.path.exists(value) or (has_magic(value) and glob(value, recursive=True))):
                problems.append(tree.problem(place, f"{value} does not exist on this machine"))
    return problems
