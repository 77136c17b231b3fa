"""What a rank of a ring computes, against the definition of windows, chunks and documents."""

from itertools import product

import pytest
import torch

from trainer.engine.parallel.context import pieces
from trainer.engine.parallel.context.pieces import Pieces

LENGTHS = (1, 2, 5, 12)
REACHES = [
    *({"window": n} for n in (1, 3, 7, 12, 40)),
    *({"chunk": n} for n in (1, 4, 12, 24, 50)),
    {"window": 5, "chunk": 7},
    {},
]


def positions(ranks, rank, length):
    first, second = rank * length, (2 * ranks - 1 - rank) * length
    return torch.cat([torch.arange(first, first + length), torch.arange(second, second + length)])


def definition(query, key, window=None, chunk=None):
    seen = key <= query
    if window:
        seen &= query - key < window
    if chunk:
        seen &= query // chunk == key // chunk
    return seen


@pytest.mark.parametrize("with_documents", [False, True])
@pytest.mark.parametrize("reach", REACHES, ids=str)
def test_each_query_meets_each_key_that_it_sees_once(reach, with_documents, monkeypatch):
    monkeypatch.setattr(pieces, "LEAST_ROWS", 2)
    for ranks, length in product((2, 3), LENGTHS):
        how, whole = Pieces(ranks, length, **reach), 2 * ranks * length
        ids = torch.arange(whole) // 3 if with_documents else torch.zeros(whole)
        at = [positions(ranks, rank, length) for rank in range(ranks)]
        documents = torch.stack([ids[each] for each in at])[None] if with_documents else None
        for mine in range(ranks):
            first = torch.zeros(2 * length)
            for source in range(ranks):
                found = torch.zeros(2 * length, 2 * length)
                query = torch.zeros(1, 2 * length, 1, 1)
                for part in how.parts(mine, source, query, documents):
                    area = found[part.rows, part.keys]
                    seen = torch.ones_like(area) if part.mask is None else part.mask[0, 0]
                    area += seen.tril() if part.is_causal else seen
                    first[part.rows] += part.is_first
                    assert not part.is_first or seen.any(1).all()
                wanted = definition(at[mine][:, None], at[source], **reach)
                wanted &= ids[at[mine]][:, None] == ids[at[source]]
                assert torch.equal(found, wanted.float()), (ranks, length, mine, source)
            if reach:
                assert first.eq(1).all()


def test_keys_out_of_reach_are_left_out():
    """Of 2 * 8 pieces of 1,024 positions, a window of 128 meets few, and chunks of a piece none."""
    query = torch.zeros(1, 2048, 1, 1)
    areas = {}
    for reach in ("window", "chunk"):
        how = Pieces(8, 1024, **{reach: 128 if reach == "window" else 1024})
        parts = [part for source in range(8) for part in how.parts(3, source, query, None)]
        areas[reach] = sum(
            len(range(2048)[part.rows]) * len(range(2048)[part.keys]) for part in parts
        )
        if reach == "chunk":
            assert [part.mask for part in parts] == [None] * 2
    assert areas["window"] < 2048 * (128 + 128 + 128)
    assert areas["chunk"] == 2 * 1024**2
