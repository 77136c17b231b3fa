"""Optimizers of matrices against torch, and against the formula of each paper in float64."""

import numpy as np
import pytest
import torch
from torch import nn

from trainer.engine.optim.matrix.rounds import assign_owners, plan_rounds
from trainer.engine.optim.matrix.tables import AdamH, AdamWKeys, Dion2, Muon, MuonH, NorMuon
from trainer.engine.optim.parameters import parameter_groups, undecorated_step
from trainer.engine.optim.placement import DimSplit, Matrix, ParameterPlacement
from trainer.engine.optim.tables import ParameterGroup

FACTORS = [0.5, 1.0, 0.7]
SHAPES = {"wide": (6, 10), "tall": (12, 5), "square": (8, 8), "norm": (7,)}


def steps_of(config, shapes=SHAPES, dtype=torch.float64, factors=FACTORS):
    """Return weights after steps on seeded gradients, and the starts and gradients."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda shape: torch.randn(shape, generator=generator, dtype=dtype)  # noqa: E731
    starts = {name: draw(shape) for name, shape in shapes.items()}
    gradients = [{name: draw(shape) for name, shape in shapes.items()} for _ in factors]
    model = {name: nn.Parameter(start.clone()) for name, start in starts.items()}
    placements = {
        name: ParameterPlacement(name, shape, len(shape) > 1) for name, shape in shapes.items()
    }
    groups = parameter_groups(model.items(), config, placements=placements)
    optimizer = config.build(groups, torch.device("cpu"))
    step = undecorated_step(optimizer)
    for factor, given in zip(factors, gradients, strict=True):
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * factor
        for name, weight in model.items():
            weight.grad = given[name].clone()
        step()
    return model, starts, gradients


def newton_schulz(u, iterations):
    """Keller Jordan, "Muon: An optimizer for hidden layers in neural networks", 2024."""
    x = u.T if u.shape[0] > u.shape[1] else u
    x = x / np.linalg.norm(x)
    for _ in range(iterations):
        s = x @ x.T
        x = 3.4445 * x + (-4.7750 * s + 2.0315 * s @ s) @ x
    return x.T if u.shape[0] > u.shape[1] else x


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("scale", ["match_rms_adamw", "original"])
def test_matrices_follow_the_formula(scale, nesterov):
    config = Muon(lr=0.1, weight_decay=0.2, momentum=0.8, scale=scale, nesterov=nesterov)
    found, starts, gradients = steps_of(config)
    for name in ("wide", "tall", "square"):
        x, m = starts[name].numpy(), 0
        for factor, given in zip(FACTORS, gradients, strict=True):
            g = given[name].numpy()
            m = 0.8 * m + g
            o = newton_schulz(g + 0.8 * m if nesterov else m, 5)
            rows, columns = x.shape
            original = max(1, rows / columns) ** 0.5
            size = original if scale == "original" else 0.2 * max(rows, columns) ** 0.5
            x = x - 0.1 * factor * 0.2 * x - 0.1 * factor * size * o
        assert found[name].detach().numpy() == pytest.approx(x, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("scale", ["match_rms_adamw", "original"])
def test_matrices_are_updated_as_by_torch(scale):
    config = Muon(lr=0.03, weight_decay=0.2, scale=scale, orthogonalize_dtype="bf16")
    shapes = {name: shape for name, shape in SHAPES.items() if len(shape) > 1}
    found, starts, gradients = steps_of(config, shapes, torch.float32)
    theirs = {name: nn.Parameter(start.clone()) for name, start in starts.items()}
    optimizer = torch.optim.Muon(
        theirs.values(),
        weight_decay=0.2,
        # torch's lerp multiplies the momentum by 1 - momentum, which the norm removes again.
        adjust_lr_fn=scale,
    )
    for factor, given in zip(FACTORS, gradients, strict=True):
        optimizer.param_groups[0]["lr"] = 0.03 * factor
        for name, weight in theirs.items():
            weight.grad = given[name].clone()
        optimizer.step()
    for name, weight in theirs.items():
        moved = (weight - starts[name]).norm()
        # Both multiply in bf16: they round momenta that differ by a factor.
        assert (found[name] - weight).norm() < 0.02 * moved, name


def test_what_is_no_matrix_takes_adamw_with_keys_of_its_own():
    table = AdamWKeys(lr=0.05, weight_decay=0.0, betas=(0.8, 0.9), eps=1e-6)
    config = Muon(lr=0.1, adamw=table, groups=[ParameterGroup(match="norm2", lr_scale=2.0)])
    found, starts, gradients = steps_of(config, {**SHAPES, "norm2": (3,)})
    for name, lr in (("norm", 0.05), ("norm2", 0.1)):
        weight = nn.Parameter(starts[name].clone())
        adamw = torch.optim.AdamW([weight], weight_decay=0.0, betas=(0.8, 0.9), eps=1e-6)
        for factor, given in zip(FACTORS, gradients, strict=True):
            adamw.param_groups[0]["lr"] = lr * factor
            weight.grad = given[name]
            adamw.step()
        torch.testing.assert_close(found[name], weight, rtol=1e-12, atol=1e-14)


def test_a_stack_is_updated_matrix_by_matrix():
    stack, starts, gradients = steps_of(Muon(lr=0.1), {"experts": (3, 2, 4, 6)})
    for i in range(3):
        for j in range(2):
            x, m = starts["experts"][i, j].numpy(), 0
            for factor, given in zip(FACTORS, gradients, strict=True):
                g = given["experts"][i, j].numpy()
                m = 0.95 * m + g
                size = 0.1 * factor * 0.2 * 6**0.5
                x = x * (1 - 0.1 * factor * 0.1) - size * newton_schulz(g + 0.95 * m, 5)
            assert stack["experts"][i, j].detach().numpy() == pytest.approx(x, rel=1e-9)


def test_normuon_follows_the_formula():
    """arXiv:2510.05491, algorithm 1."""
    config = NorMuon(lr=0.1, weight_decay=0.2, beta2=0.9)
    found, starts, gradients = steps_of(config)
    for name in ("wide", "tall", "square"):
        x, m, v = starts[name].numpy(), 0, 0
        for factor, given in zip(FACTORS, gradients, strict=True):
            m = 0.95 * m + given[name].numpy()
            o = newton_schulz(given[name].numpy() + 0.95 * m, 5)
            v = 0.9 * v + 0.1 * (o**2).mean(axis=1, keepdims=True)
            u = o / (np.sqrt(v) + 1e-8)
            u *= np.linalg.norm(o) / np.linalg.norm(u)
            size = 0.1 * factor * 0.2 * max(x.shape) ** 0.5
            x = x * (1 - 0.1 * factor * 0.2) - size * u
        assert found[name].detach().numpy() == pytest.approx(x, rel=1e-9, abs=1e-12)


def test_muonh_follows_the_formula():
    """W <- R n(W - lr R n(u)), arXiv:2606.16899."""
    found, starts, gradients = steps_of(MuonH(lr=0.1))
    for name in ("wide", "tall", "square"):
        x, m = starts[name].numpy(), 0
        radius = np.linalg.norm(x)
        for factor, given in zip(FACTORS, gradients, strict=True):
            m = 0.95 * m + given[name].numpy()
            u = newton_schulz(given[name].numpy() + 0.95 * m, 5)
            z = x - 0.1 * factor * radius * u / np.linalg.norm(u)
            x = radius * z / np.linalg.norm(z)
        assert found[name].detach().numpy() == pytest.approx(x, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("fraction", [0.3, 1.0])
def test_dion2_follows_the_formula(fraction):
    """arXiv:2512.16928, algorithm 1, with the largest rows or columns."""
    found, starts, gradients = steps_of(Dion2(lr=0.1, fraction=fraction, momentum=0.8))
    for name in ("wide", "tall", "square"):
        x, m = starts[name].numpy(), 0
        rows, columns = x.shape
        axis, size = (0, rows) if rows <= columns else (1, columns)
        for factor, given in zip(FACTORS, gradients, strict=True):
            m = m + given[name].numpy()
            chosen = np.argsort(-np.abs(m).sum(1 - axis))[: int(np.ceil(fraction * size))]
            part = (chosen, slice(None)) if axis == 0 else (slice(None), chosen)
            o = np.zeros_like(x)
            o[part] = newton_schulz(m[part], 5)
            m[part] *= 0.8
            x = x * (1 - 0.1 * factor * 0.1) - 0.1 * factor * 0.2 * max(rows, columns) ** 0.5 * o
        assert found[name].detach().numpy() == pytest.approx(x, rel=1e-9, abs=1e-12)


def test_adamh_follows_the_formula():
    """Adam's direction in the place of the orthogonalized momentum, arXiv:2606.16899."""
    found, starts, gradients = steps_of(AdamH(lr=0.1, betas=(0.8, 0.9), eps=1e-6))
    for name in ("wide", "tall", "square"):
        x, m, v = starts[name].numpy(), 0, 0
        radius = np.linalg.norm(x)
        for k, (factor, given) in enumerate(zip(FACTORS, gradients, strict=True), 1):
            g = given[name].numpy()
            m, v = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g**2
            u = m / (1 - 0.8**k) / (np.sqrt(v / (1 - 0.9**k)) + 1e-6)
            z = x - 0.1 * factor * radius * u / np.linalg.norm(u)
            x = radius * z / np.linalg.norm(z)
        assert found[name].detach().numpy() == pytest.approx(x, rel=1e-9, abs=1e-12)


def test_a_matrix_of_zeros_stays_where_it_is():
    weight = nn.Parameter(torch.ones(3, 4))
    placement = {"weight": ParameterPlacement("weight", (3, 4))}
    config = Muon(weight_decay=0.0)
    groups = parameter_groups([("weight", weight)], config, placements=placement)
    weight.grad = torch.zeros(3, 4)
    undecorated_step(config.build(groups, torch.device("cpu")))()
    assert torch.equal(weight, torch.ones(3, 4))


def test_parts_are_cut_as_torch_chunks():
    placed = ParameterPlacement(
        "w", (10, 6), splits=(DimSplit(0, 2, 1), DimSplit(0, 4, 2)), ranks=8
    )
    for rank in range(8):
        outer = torch.arange(10).chunk(2)[rank % 2]
        inner = outer.chunk(4)
        held = inner[rank // 2].tolist() if rank // 2 < len(inner) else []
        (first, end), columns = placed.part(rank)
        assert list(range(first, end)) == held
        assert columns == (0, 6)


def test_blocks_of_rows_are_matrices_of_their_own():
    placed = ParameterPlacement("w", (2, 7, 5), block_rows=(4, 3))
    assert list(placed.matrices()) == [
        Matrix((0,), (0, 4), 5, 0), Matrix((0,), (4, 7), 5, 1),
        Matrix((1,), (0, 4), 5, 2), Matrix((1,), (4, 7), 5, 3),
    ]  # fmt: skip


def test_owners_share_the_work_and_nothing_moves_that_lies_whole():
    split = [
        [ParameterPlacement(f"w{n}", (8, 8), True, (DimSplit(0, 4, 1),), 4, rank) for n in range(8)]
        for rank in range(4)
    ]
    rounds = [
        plan_rounds(assign_owners(placements, [0.0] * 4), 4, rank)
        for rank, placements in enumerate(split)
    ]
    assert [[each.num_owned for each in found] for found in rounds] == [[2]] * 4
    assert all(each.gather.is_needed for found in rounds for each in found)
    experts = ParameterPlacement("e", (8, 4, 4), True, (DimSplit(0, 4, 1),), 4, 1)
    (alone,) = plan_rounds(assign_owners([experts], [0.0] * 4), 4, 1)
    assert alone.num_owned == 2
    assert not alone.gather.is_needed
    assert not alone.scatter.is_needed
