"""Quorum, deadline, grace window and late updates: by hand, and in runs."""

import json
import shutil

import numpy as np
import pytest
import torch

from tests.federated.conftest import RECIPE, assert_equal, rows, tensors
from trainer.engine.checkpoint.manifest import read_manifest
from trainer.engine.federated.arrivals.simulate import simulate_rounds
from trainer.engine.federated.arrivals.tables import Late, Trace
from trainer.engine.federated.arrivals.timeline import Timeline
from trainer.engine.federated.arrivals.trace import ClientTrace, RoundDraw
from trainer.engine.federated.sampler import sample_clients
from trainer.engine.federated.tables import Federation


class Given:
    """Durations of three clients, the same in each round; those of `fails` fail after half."""

    def __init__(self, seconds, fails=()):
        self.seconds, self.fails = np.array(seconds), fails

    def draw(self, number):
        fails = np.array([(number, client) in self.fails for client in range(len(self.seconds))])
        return RoundDraw(self.seconds, fails, self.seconds / 2)


def play(late, seconds, rounds, fails=(), recovery=0.0):
    """Return for each round: trained, merged as (client, round), dropped, failed, seconds."""
    timeline = Timeline(late, Trace(recovery_seconds=recovery), Given(seconds, fails))
    found = []
    for number in range(1, rounds + 1):
        timing = timeline.run_round(number, range(len(seconds)))
        merged = [(flight.client, flight.round) for flight in timing.merged]
        dropped = [flight.client for flight in timing.dropped]
        found.append((timing.trained, merged, dropped, timing.failed, timing.seconds))
    return found


def test_without_a_limit_a_round_waits_for_all():
    assert play(Late(), [1.0, 5.0, 2.0], 1) == [([0, 1, 2], [(0, 1), (1, 1), (2, 1)], [], [], 5.0)]


def test_a_late_client_gives_up_at_the_deadline():
    (only, again) = play(Late(deadline_seconds=3.0), [1.0, 5.0, 2.0], 2)
    assert only == ([0, 2], [(0, 1), (2, 1)], [1], [], 3.0)
    assert again[1] == [(0, 2), (2, 2)]


def test_a_round_waits_for_the_quorum_beyond_its_deadline():
    (only,) = play(Late(deadline_seconds=1.5, quorum=2), [1.0, 5.0, 2.0], 1)
    assert only[1] == [(0, 1), (2, 1)]
    assert only[4] == 2.0


@pytest.mark.parametrize("policy", ["next", "stale"])
def test_a_late_update_is_merged_with_the_round_in_which_it_arrives(policy):
    found = play(Late(policy=policy, deadline_seconds=3.0), [1.0, 5.0, 2.0], 4)
    assert [merged for _, merged, *_ in found] == [
        [(0, 1), (2, 1)], [(0, 2), (1, 1), (2, 2)], [(0, 3), (2, 3)], [(0, 4), (1, 3), (2, 4)]
    ]  # fmt: skip
    # A client whose update is under way does not start again.
    assert [trained for trained, *_ in found] == [[0, 1, 2], [0, 2], [0, 1, 2], [0, 2]]
    assert [each[4] for each in found] == [3.0, 2.0, 3.0, 2.0]


def test_learners_of_a_grace_window_run_at_their_own_pace():
    found = play(Late(policy="stale", quorum=1, grace_seconds=1.0), [1.0, 5.0, 2.5], 3)
    # Ends: 1 + 1; then client 2 is there at 2.5, and after a second client 0 as well; ...
    assert [merged for _, merged, *_ in found] == [[(0, 1)], [(0, 2), (2, 1)], [(0, 3), (1, 1)]]
    assert [each[4] for each in found] == [2.0, 1.5, 2.0]


def test_failures_and_a_missed_quorum_make_an_empty_round():
    found = play(Late(quorum=2), [1.0, 2.0], 3, fails={(1, 0), (2, 1)}, recovery=1.0)
    assert found[0] == ([], [], [1], [0], 2.0)
    # Client 0 failed after 0.5 s, is back at 1.5 s, and in round 2 client 1 fails.
    assert found[1][1:4] == ([], [0], [1])
    assert Late(policy="stale", power=0.5).weigh(3) == 0.5
    assert Late(policy="next").weigh(3) == 1.0


def test_a_trace_follows_from_the_seed_and_has_the_moments_asked_for():
    table = Trace(step_seconds=2.0, spread=0.5, jitter=0.2, failure=0.1, bandwidth=8.0)
    trace = ClientTrace(table, 5000, 10, 16.0, seed=1)
    draw, again = trace.draw(3), ClientTrace(table, 5000, 10, 16.0, seed=1).draw(3)
    assert (draw.seconds == again.seconds).all()
    assert (draw.seconds != trace.draw(4).seconds).any()
    logs = np.log((draw.seconds - 2.0) / 20.0)
    assert np.std(logs) == pytest.approx((0.5**2 + 0.2**2) ** 0.5, rel=0.05)
    assert draw.fails.mean() == pytest.approx(0.1, abs=0.02)
    assert (draw.failure_seconds < draw.seconds).all()


def test_durations_of_an_earlier_run_are_replayed(tmp_path):
    lines = [{"kind": "client", "round": 2, "client": "b", "seconds": 7.5}, {"kind": "round"}]
    (tmp_path / "m.jsonl").write_text("\n".join(map(json.dumps, lines)))
    trace = ClientTrace(Trace(file=str(tmp_path / "m.jsonl")), 2, 3, 0.0, 0, ["a", "b"])
    assert trace.draw(2).seconds.tolist() == [3.0, 7.5]
    assert trace.draw(1).seconds.tolist() == [3.0, 3.0]


def test_the_slowest_are_left_out():
    table = Federation(clients=20, rounds=1, local_steps=1, dropout=0.5,
                       dropout_function="slowest", trace={"spread": 1.0})  # fmt: skip
    speeds = ClientTrace(table.trace, 20, 1, 0.0, 5).speeds
    assert sample_clients(table, 5, 1) == sorted(np.argsort(-speeds)[:10].tolist())


def simulate(clients, late, rounds=50, **trace):
    table = {"clients": clients, "rounds": 50, "local_steps": 10, "late": late, "trace": trace}
    return simulate_rounds(Federation.model_validate(table), 10, 0.0, seed=0, rounds=rounds)


def test_goodput_is_that_of_the_formula_without_faults():
    found = simulate(100, {})
    assert (found.goodput, found.lock_step_goodput, found.seconds) == (1.0, 1.0, 500.0)
    # Of two speeds, the fast client waits.
    slow = simulate(2, {}, spread=1.0)
    speeds = ClientTrace(Trace(spread=1.0), 2, 1, 0.0, 0).speeds
    assert slow.goodput == pytest.approx((speeds.min() / speeds.max() + 1) / 2)


def test_asynchronous_learners_keep_their_goodput_under_failures_at_scale():
    faults = {"failure": 0.02, "spread": 0.3, "jitter": 0.1, "recovery_seconds": 5.0}
    late = {"policy": "stale", "quorum": 50, "grace_seconds": 0.1}
    found, waiting = simulate(1000, late, 400, **faults), simulate(1000, {}, 40, **faults)
    assert found.lock_step_goodput < 0.01  # of 1,000 clients one fails in each attempt
    assert found.goodput > 0.9
    assert waiting.goodput < 0.5
    assert found.staleness > 0


LATE = """
[federation.late]
policy = "stale"
deadline_seconds = 3.0
[federation.trace]
spread = 0.5
failure = 0.1
"""


def test_a_run_weighs_late_updates_by_their_age(federate, tmp_path):
    """Compute the global weights of round 2 in float64 from what the checkpoints hold."""
    (tmp_path / "recipe.toml").write_text(RECIPE + LATE.replace("failure = 0.1", ""))
    run = federate("r", federation__rounds=4, federation__weighting="uniform")
    table = Federation(clients=4, rounds=4, local_steps=2, late=Late(deadline_seconds=3.0,
                       policy="stale"), trace=Trace(spread=0.5))  # fmt: skip
    timeline = Timeline(table.late, table.trace, ClientTrace(table.trace, 4, 2, 0.0, 0))
    timings = [timeline.run_round(number, range(4)) for number in range(1, 5)]
    merged = [[(flight.client, flight.round) for flight in each.merged] for each in timings]
    late = {client for client, _ in merged[1]} & {c for c, n in merged[1] if n == 1}
    assert late, "the seed makes no client late"
    names = {name.partition(".")[2] for name in tensors(run, 2) if "_late." in name}
    assert names
    found = rows(run, "round")
    assert [row["merged"] for row in found] == [len(each) for each in merged]
    assert [row["merged_late"] for row in found] == [
        sum(n < number for _, n in each) for number, each in enumerate(merged, 1)
    ]
    # A round of late updates alone moves the weights by their weighted mean.
    assert {row["client"] for row in rows(run, "client") if row.get("late")} >= {*map(str, late)}


@pytest.mark.parametrize("compression", ["none", pytest.param("int8", marks=pytest.mark.matrix)])
def test_a_run_with_late_updates_and_failures_resumes(federate, tmp_path, compression):
    (tmp_path / "recipe.toml").write_text(RECIPE + LATE)
    settings = {"federation__rounds": 5, "federation__compression__name": compression}
    whole = federate("whole", **settings)
    for number in (1, 3):
        run = whole.with_name(f"from-{number}")
        shutil.copytree(whole, run)
        for folder in (run / "checkpoints").glob("step-*"):
            if int(folder.name[5:]) > 2 * number:
                shutil.rmtree(folder)
        federate(run.name, **settings)
        assert_equal(tensors(run, 10), tensors(whole, 10))
        assert rows(run, "round") == rows(whole, "round")


def test_a_client_that_is_dropped_continues_from_before_the_round(federate, tmp_path):
    text = RECIPE + LATE.replace('"stale"', '"drop"').replace("failure = 0.1", "")
    (tmp_path / "recipe.toml").write_text(text)
    run = federate("r", federation__rounds=2)
    (first, second) = rows(run, "round")
    assert first["dropped"] + second["dropped"] > 0
    trained = [row["client"] for row in rows(run, "client")]
    manifest = read_manifest(run / "checkpoints" / "step-00000004")
    batches = [each["batch"] for each in manifest.extra["federation"]["clients"]]
    assert batches == [2 * trained.count(str(client)) for client in range(4)]
    assert not [name for name in tensors(run, 4) if "_late." in name]
    assert torch.isfinite(torch.tensor([row["loss"] for row in rows(run, "round")])).all()


def test_the_plan_simulates_faults(command, tmp_path):
    (tmp_path / "recipe.toml").write_text(RECIPE + LATE)
    words = ["federate", "plan", "recipe.toml", "--cpu", "--simulate", "20"]
    code, out, _ = command(*words, "--set=federation.clients=1000", "--json")
    found = json.loads(out)["simulation"]
    assert code == 0
    assert found["failed"] == pytest.approx(20 * 1000 * 0.1, rel=0.5)
    assert 0 < found["goodput"] < 1
    assert "in lock step" in command(*words)[1]
    code, _, errors = command("validate", "recipe.toml", "--set=federation.late.quorum=5")
    assert code == 2
    assert "quorum (5) is more than the 4 clients of a round" in errors
