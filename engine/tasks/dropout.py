"""Keys of dropout, which depend on seed, step and sample, and never on the rank."""

from __future__ import annotations

from torch import Tensor

from ...kernels.ragged.lengths import SampleLengths
from ...kernels.ragged.samples import repeat_for_positions
from ..data.collate import POSITION_STRIDE


def find_dropout_keys(
    sample_keys: Tensor | None, positions: Tensor, lengths: SampleLengths | None
) -> dict[str, Tensor]:
    """Return the argument `dropout_keys` of a model; none without keys.

    Args:
        sample_keys: [B] int64, of each row; see `collate.make_keys`. None: there is no dropout.
        positions: the position of each token in its whole row, [B, S], or [1, T] of ragged rows.
        lengths: those of ragged rows; None: the rows are padded.
    """
    if sample_keys is None:
        return {}
    if lengths is None:
        keys = sample_keys.unsqueeze(1)
    else:
        keys = repeat_for_positions(sample_keys, lengths).view(1, -1)
    # By the position in the whole row: ranks may share it.
    return {"dropout_keys": positions * POSITION_STRIDE + keys}
