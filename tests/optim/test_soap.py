"""SOAP against another library, and against the formula of the paper in float64."""

import numpy as np
import pytest
import pytorch_optimizer
import torch
from torch import nn

from tests.optim.test_muon import newton_schulz, steps_of
from trainer.engine.optim.matrix.eigenbasis import find_basis, update_basis
from trainer.engine.optim.matrix.tables import SOAP, SOAPMuon

FACTORS = [0.5, 1.0, 0.7, 1.0, 0.9, 0.8, 1.0]
SHAPES = {"wide": (6, 10), "tall": (12, 5), "square": (8, 8), "stack": (2, 3, 4)}


def soap_updates(gradients, beta1, beta2, eps, interval, most):
    """Yield SOAP's updates: arXiv:2409.11321, algorithm 3, with bias correction.

    Bases begin with the eigenvectors of the first covariance, and the first gradient changes
    nothing, as in the code of the authors.
    """
    sides = [side for side in (0, 1) if gradients[0].shape[side] <= most]
    covariance, basis, m, v = {}, {}, 0, 0
    for t, g in enumerate(gradients):
        product = {0: g @ g.T, 1: g.T @ g}

        def rotate(x):
            x = basis[0].T @ x if 0 in sides else x
            return x @ basis[1] if 1 in sides else x

        if t:
            m = beta1 * m + (1 - beta1) * g
            v = beta2 * v + (1 - beta2) * rotate(g) ** 2
            n = rotate(m) / (1 - beta1**t) / (np.sqrt(v / (1 - beta2**t)) + eps)
            n = basis[0] @ n if 0 in sides else n
            yield n @ basis[1].T if 1 in sides else n
        for side in sides:
            old = covariance.get(side, 0)
            covariance[side] = beta2 * old + (1 - beta2) * product[side]
            if not t:
                basis[side] = find_basis(torch.from_numpy(covariance[side])[None])[0].numpy()
            elif t % interval == 0:
                s = covariance[side] @ basis[side]
                order = np.argsort(-np.sum(basis[side] * s, axis=0))
                s = (
                    s
                    + np.finfo(float).eps ** 0.5 * covariance[side].diagonal().mean() * basis[side]
                )
                basis[side] = np.linalg.qr(s[:, order])[0]
                v = np.take(v, order, axis=side)


@pytest.mark.parametrize("most", [100, 8])
@pytest.mark.parametrize("kind", [SOAP, SOAPMuon])
def test_matrices_follow_the_formula(kind, most):
    keys = {"weight_decay": 0.2, "betas": (0.8, 0.9), "eps": 1e-12}
    config = kind(lr=0.1, basis_interval=2, max_factor_dim=most, **keys)
    found, starts, gradients = steps_of(config, SHAPES, factors=FACTORS)
    for name, shape in SHAPES.items():
        for i in np.ndindex(*shape[:-2]):
            x = starts[name].numpy()[i]
            given = [each[name].numpy()[i] for each in gradients]
            updates = soap_updates(given, 0.8, 0.9, 1e-12, 2, most)
            for factor, u in zip(FACTORS[1:], updates, strict=True):
                if kind is SOAPMuon:
                    u = 0.2 * max(x.shape) ** 0.5 * newton_schulz(u, 5)
                x = x * (1 - 0.1 * factor * 0.2) - 0.1 * factor * u
            assert found[name].detach().numpy()[i] == pytest.approx(x, rel=1e-6, abs=1e-9), name


@pytest.mark.parametrize("most", [100, 10])
def test_matrices_are_updated_as_by_pytorch_optimizer(most):
    # Its bases of rank-deficient covariances depend on rounding: only sides are compared that have
    # none. Its bases are updated in fp32.
    shapes = {"square": (8, 8), "wide": (6, 11)} if most == 10 else {"square": (8, 8)}
    config = SOAP(lr=0.01, weight_decay=0.0, basis_interval=3, max_factor_dim=most)
    factors = [1.0] * 12
    found, starts, gradients = steps_of(config, shapes, factors=factors)
    theirs = {name: nn.Parameter(start.clone()) for name, start in starts.items()}
    optimizer = pytorch_optimizer.SOAP(
        theirs.values(),
        lr=0.01,
        weight_decay=0.0,
        precondition_frequency=3,
        max_precondition_dim=most,
    )
    for given in gradients:
        for name, weight in theirs.items():
            weight.grad = given[name].clone()
        optimizer.step()
    for name, weight in theirs.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-6, atol=1e-6)


def test_a_basis_does_not_depend_on_rounding():
    generator = torch.Generator().manual_seed(0)
    thin = torch.randn(3, 20, 4, generator=generator, dtype=torch.float64)
    covariances = thin @ thin.mT
    noise = 1e-15 * torch.randn(3, 20, 20, generator=generator, dtype=torch.float64)
    basis, moved = find_basis(covariances), find_basis(covariances + noise + noise.mT)
    updated, noisy = (
        update_basis(each, basis)[0] for each in (covariances, covariances + noise + noise.mT)
    )
    for each in (updated, noisy):  # null vectors have no order: each is one of the old ones
        overlaps = (each[:, :, 4:].mT @ basis[:, :, 4:]).abs().amax(2)
        torch.testing.assert_close(overlaps, torch.ones_like(overlaps), rtol=0, atol=1e-6)
    signs = (basis * moved).sum(1, keepdim=True).sign()
    torch.testing.assert_close(moved * signs, basis, rtol=0, atol=1e-11)
    eye = torch.eye(20, dtype=torch.float64)
    torch.testing.assert_close(basis.mT @ basis, eye.expand(3, -1, -1))
    inner = basis.mT @ covariances @ basis
    values = inner.diagonal(dim1=1, dim2=2)
    torch.testing.assert_close(inner, torch.diag_embed(values))
    assert (values.diff() < 1e-9).all()
