"""What does not work with rows of unequal lengths, data.packing = "ragged"."""

from __future__ import annotations

from collections.abc import Iterator

from ...core.text.tree import Finding
from ...precision.choose import required_multiple
from ...precision.tables import MX
from ..schema import Recipe

WHY_NOT_AXES = {
    "context": "ranks of this axis share each row evenly",
    "tensor": "ranks of this axis share the positions of a row evenly",
    "pipeline": "stages send each other activations of one shape",
}
HINT = 'take data.packing = "none"'


def check_ragged(recipe: Recipe) -> Iterator[Finding]:
    """Yield what needs rows of one length."""
    is_ragged = recipe.data.packing == "ragged"
    # A plugin's samples: the task says which of their fields differ in length.
    if is_ragged != bool(getattr(recipe.task, "ragged", is_ragged)):
        message = "names the fields of unequal lengths, and goes with data.packing"
        hint = 'name one, or take data.packing = "none"' if is_ragged else 'set it to "ragged"'
        yield ("task", "ragged"), f'{message} = "ragged"', hint
    if not is_ragged:
        return
    if not recipe.model.takes_lengths:
        hint = "" if recipe.task.needs_language_model else ", or give its config takes_lengths"
        yield (
            ("data", "packing"),
            f'the model "{recipe.model.name}" takes rows of one length only, not "ragged"',
            f"{HINT}{hint}",
        )
    for axis, why in WHY_NOT_AXES.items():
        if recipe.parallel.degrees.by_axis[axis] not in (0, 1):
            hint = f"keep 1, or {HINT}"
            yield ("parallel", axis), f'{why}, and rows are "ragged"', hint
    if recipe.compile.enabled:
        message = 'torch.compile compiles for shapes, and "ragged" batches each have another'
        yield ("compile", "enabled"), message, f"set it to false, or {HINT}"
    for word, table in recipe.precision.low_precision.items():
        if required_multiple(table) == 1 or (table.emulate and not isinstance(table, MX)):
            continue
        multiple = required_multiple(table)
        message = f'its products sum over blocks of {multiple} tokens, and rows are "ragged"'
        yield ("precision", word, "enabled"), message, f"set it to false, or {HINT}"
