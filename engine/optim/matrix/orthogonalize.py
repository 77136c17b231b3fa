"""Orthogonalizes batches of matrices (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon)."""

from __future__ import annotations

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""of X, (X X^T) X and (X X^T)^2 X in an iteration; they bring singular values near 1, not to it"""


def orthogonalize(matrices: Tensor, steps: int, eps: float = 1e-7) -> Tensor:
    """Return nearly orthogonal matrices with the singular vectors of the given ones.

    The Newton-Schulz iteration raises all singular values to between 0.7 and 1.2. A matrix of zeros
    stays one.

    Args:
        matrices: [N, rows, columns]; they are computed in the dtype that they have.
        steps: number of iterations.
        eps: least norm by which a matrix is divided.
    """
    a, b, c = COEFFICIENTS
    is_tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if is_tall else matrices
    norms = torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True)
    x = x / norms.clamp(min=eps)
    for _ in range(steps):
        square = torch.bmm(x, x.mT)
        polynomial = torch.baddbmm(square, square, square, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x.mT if is_tall else x
