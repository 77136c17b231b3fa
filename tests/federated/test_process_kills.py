"""`kill -9` of the server or a worker of 16 clients at random moments costs nothing but time."""

from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
KILLS = 12


@pytest.mark.matrix
@pytest.mark.timeout(600)
def test_a_storm_of_kills_leaves_the_federation_bit_for_bit(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import federated_kills

    measured = federated_kills.measure(KILLS, tmp_path, seed=1)
    print(f"goodput {measured['goodput']:.1%}, undisturbed {measured['goodput_undisturbed']:.1%}")
    assert measured["damage"] == []
    assert measured["differing_tensors"] == 0
    assert measured["tensors"] > 500
    assert measured["equal_rows"]
    assert measured["kills"] == KILLS
    assert min(measured["killed_servers"], measured["killed_workers"]) > 0
