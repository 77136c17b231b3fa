"""Whether training splits fit together; each alone is checked as a recipe without splits."""

from __future__ import annotations

from collections.abc import Iterator

from ...core.text.positions import KeyPath
from ...core.text.tree import Finding
from ...data.tables import TrainingSplit
from ..schema import Recipe

SIZES = ("seq_len", "global_batch", "micro_batch")


def relocate(path: KeyPath, number: int, split: TrainingSplit) -> KeyPath:
    """Return where a recipe writes what a finding about a split alone calls `data.KEY`.

    Args:
        path: the path of the finding.
        number: the number of the split.
        split: the split.
    """
    if path[0] == "data" and len(path) > 1 and getattr(split, str(path[1]), None) is not None:
        return ("data", "splits", number, *path[1:])
    return path


def check_splits(recipe: Recipe) -> Iterator[Finding]:
    """Yield what does not fit between splits, and between them and the rest."""
    data, names = recipe.data, set[str]()
    if data.sources:
        yield (
            ("data", "sources"),
            "sources stand beside data.splits, each of which has its own",
            "move them into a split; data.sources = [] takes back those of a recipe below",
        )
    if recipe.task.find_outputs(recipe.loss) is not None:
        message = "the outputs of a frozen model are on disk for one split, and not for data.splits"
        yield ("task", "precomputed"), message, "leave it out, to ask the model while training"
    for number, split in enumerate(data.splits):
        path: KeyPath = ("data", "splits", number)
        if split.name in names:
            yield (*path, "name"), f'a split is named "{split.name}" already', "take another name"
        names.add(split.name)
        if split.steps is None and any(getattr(one, "streaming", False) for one in split.sources):
            yield path, "a stream has no last row, at which a turn could end", "give it steps"
        for key in SIZES:
            is_other = getattr(split, key) not in (None, getattr(data, key))
            if is_other and recipe.parallel.pipeline != 1:
                yield (
                    (*path, key),
                    f"the stages of a pipeline take batches of data.{key} alone",
                    "leave it out, or set parallel.pipeline = 1",
                )
    lengths = {table.seq_len for table in data.tables}
    held_out = data.tables[0].validation_fraction
    if recipe.task.fields and data.on_long == "drop" and held_out and len(lengths) > 1:
        yield (
            ("data", "on_long"),
            "splits of other lengths drop other records: one could train on what another holds out",
            'take "truncate", or name sources with split = "validation"',
        )
