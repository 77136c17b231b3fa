"""Loads the weights that a run starts from."""

from __future__ import annotations

from pathlib import Path

from ...model_zoo.base import Model
from ...model_zoo.config import ModelConfig
from ...model_zoo.heads import is_head_layer
from ...model_zoo.matrices import is_adapter
from ..checkpoint.find import candidates
from ..checkpoint.manifest import Manifest
from ..checkpoint.reader import load_weights
from ..core.errors import CheckpointError
from ..core.text.selection import NameSelection, Renaming
from ..formats.hf_load import describe_added_rows, hint_at_rows, load_huggingface
from ..formats.titan_folder import is_titan_folder, load_titan
from ..recipe.tables import Init


def load_initial_weights(
    model: Model,
    config: ModelConfig,
    source: Path,
    init: Init | None = None,
    *,
    may_grow: bool = False,
) -> list[str]:
    """Load weights only, from a checkpoint of ours, Hugging Face's or torchtitan's; return notes.

    Adapters and the layer of a task's head stay as they are where the source has none, and so do
    the weights that `run.init.exclude` names.

    Args:
        model: the model, with storage for its parameters.
        config: the config that the model was built from.
        source: a checkpoint, a run directory, or a folder of another program.
        init: which weights are taken, and what they are called there.
        may_grow: whether embedding and head may have more rows here: the rows added are the mean
            of the rows before them.

    Raises:
        CheckpointError: the weights cannot be read or do not fit the model.
        RecipeError: a pattern of `run.init` matches nothing.
    """
    init = init or Init()
    selection, average = select_weights(init), init.weights == "ema"
    kept = [name for name, _ in model.named_parameters() if selection.excludes(name)]
    left_out = [f"{len(kept)} weights keep initial values: {', '.join(kept)}"] * bool(kept)
    if source.is_dir() and candidates(source):
        manifest = load_weights(
            source,
            model,
            may_lack=(is_adapter, is_head_layer),
            left=config.replaced_prefixes,
            selection=selection,
            average=average,
            may_grow=config.vocabulary_weights,
        )
        rows = _count_rows(config, manifest, selection)
        if rows < config.vocab and not may_grow:
            message = f"{source} has rows for {rows} tokens, and the model for {config.vocab}"
            raise CheckpointError(message, hint_at_rows(rows))
        averaged = "averaged " * average
        notes = [f"{averaged}weights from {source} (step {manifest.step})", *left_out]
        layer = [name for name, _ in model.named_parameters() if is_head_layer(name)]
        layer = [name for name in layer if name not in kept]
        if lacking := [name for name in layer if f"model.{name}" not in manifest.tensors]:
            notes.append(f"the checkpoint holds no {', '.join(lacking)}: new ones are trained")
        return notes + [describe_added_rows(rows, config.vocab)] * (rows < config.vocab)
    if average:
        raise CheckpointError(f"{source} is no checkpoint of ours: it has one set of weights")
    if is_titan_folder(source):
        notes = load_titan(source, model, config, selection, may_grow=may_grow)
        return [f"weights from {source}", *left_out, *notes]
    notes = load_huggingface(
        source, model, config, fresh_head=True, selection=selection, may_grow=may_grow
    )
    return [f"weights from {source}", *left_out, *notes]


def _count_rows(config: ModelConfig, manifest: Manifest, selection: NameSelection) -> int:
    """Return how many tokens a checkpoint has rows for, at most as many as the model.

    Weights that are not read do not count.
    """
    saved = {selection.rename(name.removeprefix("model.")): name for name in manifest.tensors}
    rows = [
        manifest.tensors[saved[name]]["shape"][0]
        for name in config.vocabulary_weights & saved.keys()
        if not selection.excludes(name)
    ]
    return min([config.vocab, *rows])


def select_weights(init: Init) -> NameSelection:
    """Return the weights that `[run.init]` takes."""
    renamings = [Renaming(entry.match, entry.to) for entry in init.rename]
    return NameSelection(init.exclude, renamings, "run.init")


def may_start_fresh(name: str) -> bool:
    """Return whether a weight may get initial values although `run.init_from` is given."""
    return is_adapter(name) or is_head_layer(name)
