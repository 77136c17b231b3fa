"""Outputs of a frozen model on disk, in place of that model: which ones fit a recipe."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from ..core.errors import Problem, RecipeError
from ..core.text.display import describe_changes
from ..corpus.cache import cache_folder
from ..corpus.checksums import Share
from ..corpus.output_store import AGAIN, OutputStore
from ..data.batch import Batch
from ..data.dataset import OpenedData
from ..data.precomputed import PrecomputedSamples
from ..data.samples import NumberedSamples
from ..data.tables import Data
from ..observe.metrics import VALIDATION
from ..recipe.schema import Recipe
from ..tokenizers.tokenizer import Tokenizer
from .found_model import find_model
from .frozen import fingerprint_start, fingerprint_weights

TRAIN = "train"


class NamedSamples(NamedTuple):
    """The samples of a split.

    Attributes:
        name: of the split, and of the folder of the outputs for it.
        samples: the samples, in any order.
        table: the `[data]` table that they come from.
        fingerprint: see `OpenedData`.
    """

    name: str
    samples: NumberedSamples
    table: Data
    fingerprint: Mapping[str, Any]


def name_samples(data: OpenedData, table: Data) -> Iterator[NamedSamples]:
    """Yield the training samples and, if some are held out, those of the validation."""
    yield NamedSamples(TRAIN, data.train, table, data.fingerprint)
    if data.validation is not None:
        yield NamedSamples(VALIDATION, data.validation, table, data.fingerprint)


@dataclass
class FrozenOutputs:
    """The outputs of a recipe's frozen model on disk.

    Attributes:
        folder: where they are, with a folder for each split.
        key: the key of the recipe that names the frozen model.
        origin: what all splits have in common, by key of the recipe.
        cache: where it is noted that files were verified.
        share: the processes that divide the comparison of files with their checksums.
    """

    folder: Path
    key: str
    origin: dict[str, Any]
    cache: Path
    share: Share
    _stores: dict[str, OutputStore] = field(default_factory=dict)

    @property
    def fingerprint(self) -> str:
        """What a resumed run must find unchanged of the frozen model; see `FrozenParts`."""
        weights: str = self.origin[self.key]
        return weights

    def describe(self, split: NamedSamples) -> dict[str, Any]:
        """Return what the outputs for a split depend on, by key of the recipe, as JSON has it."""
        table, sources = split.table.padded, {}
        for source, (name, content) in zip(table.sources, split.fingerprint.items(), strict=True):
            sources[f"data.sources.{name}"] = f"{content.get('xxh3')} for {source.split}"
        keys = ("seq_len", "packing", "on_long", "validation_fraction")
        own = {f"data.{key}": getattr(table, key) for key in keys}
        rows = [int(count) for count in split.samples.order.rows]
        return {**self.origin, **sources, **own, "samples": rows}

    def open_store(self, split: NamedSamples) -> OutputStore:
        """Return the outputs for a split.

        Raises:
            RecipeError: they were made from something else than the recipe names.
            DataError: they are missing or damaged.
        """
        if split.name in self._stores:
            return self._stores[split.name]
        folder = self.folder / split.name
        store = OutputStore.open_folder(folder, self.cache, self.share)
        if changes := describe_changes(store.manifest.origin, self.describe(split)):
            message = f"{folder} holds outputs of something else: {changes}"
            raise RecipeError([Problem(message, "task.precomputed", hint=AGAIN)])
        # The other splits' must be of the same model, also where the recipe does not name it.
        self.origin[self.key] = store.manifest.origin[self.key]
        self._stores[split.name] = store
        return store

    def require(self, data: OpenedData, table: Data) -> None:
        """Open the outputs for the samples of a run; see `open_store`."""
        for split in name_samples(data, table):
            self.open_store(split)

    def attach(self, split: NamedSamples, batch_class: type[Batch]) -> PrecomputedSamples:
        """Return the samples of a split with their outputs, as fields of the batches."""
        return PrecomputedSamples(split.samples, self.open_store(split), batch_class)

    def attach_all(self, data: OpenedData, table: Data, batch_class: type[Batch]) -> OpenedData:
        """Return the samples of a run with their outputs."""
        train, *others = (self.attach(each, batch_class) for each in name_samples(data, table))
        return replace(data, train=train, validation=others[0] if others else None)


def open_outputs(recipe: Recipe, tokenizer: Tokenizer, share: Share) -> FrozenOutputs | None:
    """Return the outputs on disk that a recipe learns from; None: it learns from no such.

    Raises:
        CheckpointError: there is no model at the place that the task names.
    """
    given = recipe.task.find_outputs(recipe.loss)
    if given is None:
        return None
    key = f"task.{recipe.task.frozen_key}"
    origin: dict[str, Any] = {"task": recipe.task.name, "tokenizer": tokenizer.fingerprint}
    origin |= {**describe_frozen(recipe, key), **given.settings}
    folder = Path(given.folder).expanduser()
    return FrozenOutputs(folder, key, origin, cache_folder(recipe.data.cache_dir), share)


def describe_frozen(recipe: Recipe, key: str) -> dict[str, str]:
    """Return fingerprints of the weights and of the config of a recipe's frozen model.

    It is empty if the recipe names no model, which the outputs on disk then stand for.
    """
    recipe = without_outputs(recipe)
    place = recipe.task.frozen_model(recipe.loss)
    if not place and recipe.task.needs_frozen:
        return {}
    source = find_model(place, recipe.plugins.modules) if place else None
    model = (source.recipe if source else recipe).model.model_dump(mode="json")
    weights = fingerprint_weights(source.path) if source else fingerprint_start(recipe.run)
    parts = [model] if source else [model, recipe.run.init.model_dump(mode="json")]
    if source is None and recipe.run.init.exclude:
        parts.append({"seed": recipe.run.seed})
    digest = xxhash.xxh3_128_hexdigest(json.dumps(parts, sort_keys=True).encode())
    return {key: weights, f"{key}.config": digest}


def without_outputs(recipe: Recipe) -> Recipe:
    """Return a recipe that learns from its frozen model itself."""
    if recipe.task.find_outputs(recipe.loss) is None:
        return recipe
    task = recipe.task.model_copy(update={"precomputed": ""})
    return recipe.model_copy(update={"task": task})
