"""Collectives have the types that their callers rely on, checked by Meta's `spmd_types`.

A type says along a mesh axis whether a value is sharded (S), replicated (R) or a pending sum (P).
`rulecheck` simulates the ranks in one process, puts their results together as the type says, and
compares them with the collective of one rank.
"""

import pytest
import torch

from trainer.engine.parallel import collectives

pytest.importorskip("spmd_types", reason="the package spmd-types is not installed")
from spmd_types import P, R, S, rulecheck, rules

X = torch.arange(24.0, dtype=torch.float64).view(4, 6)


def gather(*, x, dim, group):
    return rules.all_gather(x, group, src=S(dim), dst=R)


def gather_wrongly(*, x, dim, group):
    return rules.all_gather(x, group, src=S(1 - dim), dst=R)


def scatter(*, x, dim, group):
    return rules.reduce_scatter(x, group, src=P, dst=S(dim))


def reduce(*, x, group):
    return rules.all_reduce(x, group, src=P, dst=R)


@pytest.fixture(autouse=True)
def plain_noise(monkeypatch):
    # spmd_types 0.3.1 draws with an operation that torch 2.13 has on GPUs alone.
    monkeypatch.setattr(
        rulecheck, "_seeded_noise", lambda like, *key: torch.full_like(like, 1.0 + len(str(key)))
    )


def placements(function, rule, arguments, monkeypatch):
    """Return where a rule lets the input of a collective be, all of which are right."""
    monkeypatch.setattr(function, "spmd_typecheck", staticmethod(rule), raising=False)
    return rulecheck.rulecheck(function, arguments, local_tensor_mode=True).checked


@pytest.mark.parametrize("dim", [0, 1])
def test_an_all_gather_replicates_shards_and_a_reduce_scatter_shards_sums(dim, monkeypatch):
    arguments = (X, dim, "ranks")
    found = placements(collectives._AllGather, gather, arguments, monkeypatch)
    assert found == [{"x": {"ranks": S(dim)}}]
    found = placements(collectives._ReduceScatter, scatter, arguments, monkeypatch)
    assert found == [{"x": {"ranks": P}}]


def test_an_all_reduce_replicates_sums(monkeypatch):
    found = placements(collectives._AllReduce, reduce, (X, "ranks"), monkeypatch)
    assert found == [{"x": {"ranks": P}}]


def test_a_wrong_type_is_found(monkeypatch):
    with pytest.raises(rulecheck.RuleCheckError, match="does not match"):
        placements(collectives._AllGather, gather_wrongly, (X, 0, "ranks"), monkeypatch)
