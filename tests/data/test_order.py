"""The order of samples is a pure function: bijective in each epoch, mixed evenly."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from trainer.engine.data.order import (
    MIXTURE_PERIOD,
    TrainingOrder,
    ValidationOrder,
    interleave,
    permute,
    round_weights,
)

WEIGHTS = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=20)


def permutation(size: int, key: int) -> np.ndarray:
    keys = np.full(size, key, dtype=np.uint64)
    return permute(np.arange(size, dtype=np.uint64), size, keys)


@pytest.mark.parametrize("size", [*range(1, 70), 255, 256, 257, 1000, 4095, 4097, 65537, 100003])
def test_a_permutation_hits_every_row_once(size: int) -> None:
    for key in (0, 1, 2**64 - 1):
        assert np.array_equal(np.sort(permutation(size, key)), np.arange(size))


def test_a_permutation_of_any_size_stays_in_range() -> None:
    for size in (2**31 + 11, 10**12 + 39, 2**53):
        index = np.random.default_rng(0).integers(0, size, 1000).astype(np.uint64)
        sent = permute(index, size, np.full(1000, 7, dtype=np.uint64))
        assert sent.max() < size
        assert len(np.unique(sent)) == len(np.unique(index))


def test_permutations_look_random() -> None:
    size = 1000
    displaced = [permutation(size, key).astype(np.float64) for key in range(200)]
    # The mean of where one index goes over 200 keys: uniform, so within 5 sigma of the middle.
    sigma = size / np.sqrt(12 * len(displaced))
    assert np.abs(np.mean(displaced, axis=0) - (size - 1) / 2).max() < 5 * sigma
    for one, other in pairwise(displaced):
        assert abs(np.corrcoef(one, other)[0, 1]) < 0.15
        assert abs(np.corrcoef(one[:-1], one[1:])[0, 1]) < 0.15


@given(WEIGHTS)
@example([512.0, 2**-8, 2**-8])
@settings(max_examples=50)
def test_shares_round_the_weights(weights: list[float]) -> None:
    counts = np.array(round_weights(weights))
    exact = np.array(weights) / sum(weights) * MIXTURE_PERIOD
    assert counts.sum() == MIXTURE_PERIOD
    assert counts.min() >= 1
    raised = int((exact < 1).sum())  # these got one sample each, taken from the others
    assert np.abs(counts - exact).max() <= 1 + raised


@given(WEIGHTS)
@settings(max_examples=15)
def test_every_prefix_of_a_mixture_is_close_to_the_weights(weights: list[float]) -> None:
    order = TrainingOrder([10**6] * len(weights), weights, 0, shuffle=False)
    source, _ = order.locate(np.arange(2 * MIXTURE_PERIOD))
    counts = np.array(round_weights(weights))
    for which in {0, len(weights) - 1}:
        seen = np.cumsum(source == which)
        due = np.arange(1, len(source) + 1) * counts[which] / MIXTURE_PERIOD
        assert np.abs(seen - due).max() <= 1 + len(weights) / 2
        assert (source == which).sum() == 2 * counts[which]


def test_each_epoch_of_each_source_visits_its_rows_once_in_another_order() -> None:
    order = TrainingOrder([37, 100], [1.0, 3.0], seed=5, shuffle=True)
    source, row = order.locate(np.arange(3000))
    for which, rows in enumerate((37, 100)):
        mine = row[source == which]
        epochs = [mine[at : at + rows] for at in range(0, len(mine) - rows + 1, rows)]
        assert len(epochs) > 5
        assert all(np.array_equal(np.sort(epoch), np.arange(rows)) for epoch in epochs)
        assert len({epoch.tobytes() for epoch in epochs}) == len(epochs)


def test_the_seed_changes_the_order_and_nothing_else_does() -> None:
    samples = np.arange(500)
    orders = [
        TrainingOrder([1000], [1.0], seed, shuffle=True).locate(samples) for seed in (0, 0, 1)
    ]
    assert np.array_equal(orders[0], orders[1])
    assert not np.array_equal(orders[0], orders[2])


def test_any_subset_of_samples_is_located_alike() -> None:
    order = TrainingOrder([13, 50, 1000], [0.2, 1.0, 4.0], seed=3, shuffle=True)
    start = MIXTURE_PERIOD - 300
    every = order.locate(np.arange(start, start + 600))
    some = np.sort(np.random.default_rng(0).choice(600, 100, replace=False))
    for whole, part in zip(every, order.locate(start + some), strict=True):
        assert np.array_equal(whole[some], part)


def test_unshuffled_rows_come_in_their_own_order() -> None:
    _, row = TrainingOrder([5], [1.0], 0, shuffle=False).locate(np.arange(12))
    assert row.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]


def test_validation_visits_every_row_once_mixed_until_a_source_is_used_up() -> None:
    order = ValidationOrder([3, 100], [1.0, 1.0])
    source, row = order.locate(np.arange(103))
    assert source[:6].tolist() == [0, 1, 0, 1, 0, 1]
    for which, rows in enumerate((3, 100)):
        assert row[source == which].tolist() == list(range(rows))
    # A prefix does not depend on how much of it is asked for at once.
    assert np.array_equal(order.locate(np.arange(10))[0], source[:10])


def test_interleave_places_items_at_even_distances() -> None:
    source, number = interleave([4, 2], [4, 2])
    assert source.tolist() == [0, 1, 0, 0, 1, 0]
    assert number.tolist() == [0, 0, 1, 2, 1, 3]
