"""Eigenvectors of covariances, found once and then updated by orthogonal iteration."""

from __future__ import annotations

import torch
from torch import Tensor


def find_basis(covariances: Tensor) -> Tensor:
    """Return the eigenvectors of symmetric matrices as columns, the largest eigenvalue first.

    A null space has no eigenvectors of its own: rounding would choose some, and others under
    another plan. Here a ramp of weights chooses them, so that equal matrices have equal bases.

    Args:
        covariances: positive semi-definite, [N, n, n].
    """
    size = covariances.shape[-1]
    values, vectors = torch.linalg.eigh(covariances)
    least = size * torch.finfo(values.dtype).eps * values[:, -1:]
    is_null = values <= least
    order = torch.arange(1, size + 1, dtype=values.dtype, device=values.device)
    # The ramp, 1/n to 1 along the diagonal, restricted to the null space. Other eigenvectors get
    # larger eigenvalues and no products with any other, so that they stay as they are.
    inner = vectors.mT @ (vectors * (order / size).unsqueeze(1))
    inner = inner * (is_null.unsqueeze(1) & is_null.unsqueeze(2))
    inner = inner + torch.diag_embed((order + 1) * ~is_null)
    basis: Tensor = (vectors @ torch.linalg.eigh(inner).eigenvectors).flip(-1)
    return basis


def update_basis(covariances: Tensor, bases: Tensor) -> tuple[Tensor, Tensor]:
    """Return bases after one step of orthogonal iteration, and the order of their columns.

    Columns are sorted by their estimated eigenvalues first, as in the code of the authors of SOAP.

    Args:
        covariances: [N, n, n].
        bases: orthonormal columns, [N, n, n].

    Returns:
        the bases, and for each of their columns the number of the old one, [N, n].
    """
    products = covariances @ bases
    estimates = (bases * products).sum(1)
    order = estimates.argsort(dim=1, descending=True, stable=True)
    products = products.take_along_dim(order.unsqueeze(1), 2)
    return torch.linalg.qr(products).Q, order
