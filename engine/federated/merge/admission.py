"""Which updates of a round are too unlike the others to be merged."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from statistics import median

from .geometry import Geometry, Gradient
from .tables import Admission


def find_outliers(table: Admission, gradients: Sequence[Gradient], geometry: Geometry) -> list[str]:
    """Return for each update why it is rejected; an empty text: it is admitted.

    Args:
        table: the recipe's `[federation.admission]`.
        gradients: the pseudo-gradients of a round, all of them finite.
        geometry: measures them over all ranks.
    """
    reasons = [""] * len(gradients)
    if table.max_norm_ratio is not None and gradients:
        norms = [geometry.norm(gradient) for gradient in gradients]
        limit = table.max_norm_ratio * median(norms)
        for index, norm in enumerate(norms):
            if norm > limit:
                reasons[index] = f"the norm of its update is {norm:.4g}, more than {limit:.4g}"
    if table.min_cosine is not None:
        left = [index for index, reason in enumerate(reasons) if not reason]
        cosines = _cosines_with_others([gradients[index] for index in left], geometry)
        for index, cosine in zip(left, cosines, strict=True):
            if cosine < table.min_cosine:
                reasons[index] = (
                    f"the cosine of its update with the others is {cosine:.3f}, "
                    f"less than {table.min_cosine:g}"
                )
    return reasons


def _cosines_with_others(gradients: Sequence[Gradient], geometry: Geometry) -> list[float]:
    """Return the cosine of each update with the sum of the others' directions."""
    products = [[geometry.product(one, other) for other in gradients] for one in gradients]
    norms = [sqrt(row[index]) or 1.0 for index, row in enumerate(products)]
    unit = [
        [value / (norms[i] * norms[j]) for j, value in enumerate(row)]
        for i, row in enumerate(products)
    ]
    cosines = []
    for index, row in enumerate(unit):
        others = [j for j in range(len(unit)) if j != index]
        square = sum(unit[i][j] for i in others for j in others)
        length = sqrt(max(square, 0.0))
        # An update that is alone has none to be compared with.
        cosines.append(sum(row[j] for j in others) / length if length else 1.0)
    return cosines
