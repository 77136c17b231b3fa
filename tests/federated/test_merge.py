"""Merges and screens against NumPy in float64, and runs with hostile clients."""

import numpy as np
import pytest
import torch

from tests.federated.conftest import RECIPE, rows
from trainer.engine.federated.carriers import local_carrier
from trainer.engine.federated.merge.admission import find_outliers
from trainer.engine.federated.merge.geometry import Geometry
from trainer.engine.federated.merge.tables import Admission
from trainer.engine.federated.tables import merges

rng = np.random.default_rng(0)
COUNT = 7
UPDATES = rng.normal(size=(COUNT, 12))
WEIGHTS = [1.0, 2.0, 1.0, 3.0, 1.0, 2.0, 1.0]


def split(update):
    """Return an update as two tensors."""
    whole = torch.from_numpy(update.copy())
    return {"a": whole[:8].view(2, 4), "b": whole[8:]}


GEOMETRY = Geometry(split(UPDATES[0]), 1, torch.device("cpu"))


def merge(name, updates=UPDATES, **keys):
    rule = merges[name].model_validate({"name": name, **keys}).build()
    found = rule.merge([split(update) for update in updates], WEIGHTS[: len(updates)], GEOMETRY)
    return np.concatenate([found["a"].numpy().ravel(), found["b"].numpy()])


def test_norms_and_distances_are_those_of_whole_vectors():
    one, other = split(UPDATES[0]), split(UPDATES[1])
    assert GEOMETRY.norm(one) == pytest.approx(np.linalg.norm(UPDATES[0]), rel=1e-12)
    assert GEOMETRY.product(one, other) == pytest.approx(UPDATES[0] @ UPDATES[1], rel=1e-12)
    distances = GEOMETRY.squared_distances([one, other])
    square = np.sum((UPDATES[0] - UPDATES[1]) ** 2)
    assert distances[0][1] == distances[1][0] == pytest.approx(square, rel=1e-12)


@pytest.mark.parametrize("norm", [None, 0.5])
def test_a_clipped_mean_scales_long_updates(norm):
    norms = np.linalg.norm(UPDATES, axis=1)
    limit = np.median(norms) if norm is None else norm
    clipped = UPDATES * np.minimum(1, limit / norms)[:, None]
    expected = np.average(clipped, axis=0, weights=WEIGHTS)
    np.testing.assert_allclose(merge("clipped_mean", norm=norm), expected, atol=1e-12)


@pytest.mark.parametrize("trim", [0.0, 0.2, 0.3, 0.49])
def test_a_trimmed_mean_leaves_out_the_ends_of_each_number(trim):
    out = int(trim * COUNT)
    expected = np.sort(UPDATES, axis=0)[out : COUNT - out].mean(0)
    np.testing.assert_allclose(merge("trimmed_mean", trim=trim), expected, atol=1e-12)


@pytest.mark.parametrize("count", [1, 2, 6, 7])
def test_the_median_is_numpys(count):
    expected = np.median(UPDATES[:count], axis=0)
    np.testing.assert_allclose(merge("median", UPDATES[:count]), expected, atol=1e-12)


@pytest.mark.parametrize(("faulty", "keep"), [(None, 1), (1, 1), (2, 3)])
def test_krum_takes_those_with_the_nearest_neighbours(faulty, keep):
    near = COUNT - (2 if faulty is None else faulty) - 2
    distances = ((UPDATES[:, None] - UPDATES[None]) ** 2).sum(2)
    scores = [np.sort(np.delete(distances[i], i))[:near].sum() for i in range(COUNT)]
    expected = UPDATES[np.argsort(scores)[:keep]].mean(0)
    np.testing.assert_allclose(merge("krum", faulty=faulty, keep=keep), expected, atol=1e-12)


def test_screens_name_their_reason():
    base = rng.normal(size=12)
    updates = [base + 0.1 * rng.normal(size=12) for _ in range(6)]
    updates += [50 * updates[0], -updates[1]]
    table = Admission(max_norm_ratio=3.0, min_cosine=0.0)
    reasons = find_outliers(table, [split(update) for update in updates], GEOMETRY)
    assert reasons[:6] == [""] * 6
    assert "the norm of its update is" in reasons[6]
    assert "the cosine of its update with the others is -0.9" in reasons[7]
    assert find_outliers(Admission(), [split(update) for update in updates], GEOMETRY) == [""] * 8


ATTACKS = {
    "flip": lambda start, weight: 2 * start - weight,
    "nan": lambda start, weight: weight * float("nan"),
    "million": lambda start, weight: start + 1e6 * (weight - start),
}
SETTINGS = {
    "federation__clients": 10,
    "federation__rounds": 12,
    "federation__local_steps": 5,
    "optimizer__lr": 0.02,
    "schedule__name": "linear",
    "checkpoint__interval": 0,
    "evaluate__interval": 60,
    "evaluate__steps": 4,
}


@pytest.fixture
def chain(command, tmp_path):
    """Give the recipe letters of a Markov chain, and return the chain's entropy in nats."""
    own = np.random.default_rng(0)
    moves = own.dirichlet([0.5] * 8, size=8)
    letters = [0]
    for _ in range(60_000):
        letters.append(int(own.choice(8, p=moves[letters[-1]])))
    (tmp_path / "chain.txt").write_text("".join("abcdefgh"[letter] for letter in letters))
    source = 'name = "text"\npath = "chain.txt"'
    (tmp_path / "recipe.toml").write_text(RECIPE.replace('name = "synthetic"', source))
    stationary = np.linalg.matrix_power(moves, 200)[0]
    return -(stationary[:, None] * moves * np.log(moves)).sum()


def turn_hostile(monkeypatch, attack, hostile=(2, 7)):
    """Let some clients send something else than what they have learned."""
    honest = local_carrier.train_locally

    def train(parts, client, position, check):
        start = {name: each.detach().clone() for name, each in parts.model.named_parameters()}
        result = honest(parts, client, position, check)
        if client.number in hostile:
            with torch.no_grad():
                for name, weight in parts.model.named_parameters():
                    weight.copy_(ATTACKS[attack](start[name], weight))
        return result

    monkeypatch.setattr(local_carrier, "train_locally", train)


def final_loss(run):
    return rows(run, "eval")[-1]["loss"]


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.timeout(0)  # four runs
@pytest.mark.parametrize(
    ("rule", "attacks"),
    [
        ("trimmed_mean", ["flip", "nan", "million"]),
        ("median", ["flip", "nan", "million"]),
        ("krum", ["flip", "nan", "million"]),
        ("clipped_mean", ["million"]),
    ],
)
def test_two_hostile_clients_of_ten_change_the_loss_by_less_than_two_percent(
    federate, monkeypatch, chain, rule, attacks
):
    settings = {**SETTINGS, "federation__merge__name": rule}
    clean = federate("clean", **settings)
    assert final_loss(clean) < 1.15 * chain  # it has learned: the first loss is four times as high
    for attack in attacks:
        with monkeypatch.context() as patch:
            turn_hostile(patch, attack)
            run = federate(f"with-{attack}", **settings)
        assert final_loss(run) == pytest.approx(final_loss(clean), rel=0.02)
        rejected = {row["client"] for row in rows(run, "client") if "rejected" in row}
        assert rejected == ({"2", "7"} if attack == "nan" else set())


def test_a_plain_mean_is_at_the_mercy_of_one_client(federate, monkeypatch, command):
    turn_hostile(monkeypatch, "million", hostile=(1,))
    settings = {"federation__rounds": 1, "evaluate__interval": 2, "evaluate__steps": 1}
    run = federate("r", **settings)
    assert final_loss(run) > 2 * rows(run, "eval")[0]["loss"]
    screened = federate("s", federation__admission__max_norm_ratio=5.0, **settings)
    assert final_loss(screened) < rows(screened, "eval")[0]["loss"] * 1.01
    (row,) = rows(screened, "round")
    assert (row["clients"], row["rejected"]) == (3, 1)


def test_a_round_without_an_admitted_update_changes_nothing(federate, monkeypatch):
    turn_hostile(monkeypatch, "nan", hostile=range(4))
    run = federate("r", federation__rounds=2, evaluate__interval=2, evaluate__steps=1)
    assert len({row["loss"] for row in rows(run, "eval")}) == 1
    assert [row["clients"] for row in rows(run, "round")] == [0, 0]
