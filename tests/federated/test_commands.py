"""`trainer federate plan` and `trainer federate rounds`, and a run that is killed."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest

from tests.cases import also
from tests.federated.conftest import assert_equal, rows, tensors


def test_the_plan_counts_the_bytes_that_a_run_reports(command, federate):
    code, out, _ = command("federate", "plan", "recipe.toml", "--cpu", "--json",
                           "--set=federation.clients_per_round=3")  # fmt: skip
    assert code == 0
    plan = json.loads(out)
    run = federate("r", federation__clients_per_round=3)
    weights = sum(tensor.numel() for tensor in tensors(run, 8, "model.").values())
    assert plan["weights"] == weights
    for row in rows(run, "round"):
        assert row["bytes_sent"] == plan["client_sent"] * 3 == weights * 4 * 3
        assert row["bytes_received"] == plan["client_received"] * 3
    # 2 (C - 1) / C of the gradients, sent and received, in each of 2 steps.
    assert plan["data_parallel"] == 2 * 2 * 3 * weights * 4 * 2 // 4


def test_the_plan_knows_time_and_memory(command):
    words = ["--cpu", "--json", "--bandwidth", "8", "--step-seconds", "0.5"]
    code, out, _ = command("federate", "plan", "recipe.toml", *words)
    plan = json.loads(out)
    assert code == 0
    traffic = plan["client_sent"] + plan["client_received"]
    assert plan["transfer_seconds"] == pytest.approx(traffic / 1e6)
    assert plan["compute_seconds"] == 1.0
    # Weights, mean and one tensor more; Adam's two moments of the three other clients.
    assert plan["server_memory"] > 2 * plan["weights"] * 4
    assert plan["kept_memory"] >= 3 * 2 * plan["weights"] * 4
    code, out, _ = command("federate", "plan", "recipe.toml", *words,
                           "--set=federation.server.name=fedadam")  # fmt: skip
    assert json.loads(out)["server_memory"] == plan["server_memory"] + 2 * plan["weights"] * 4
    assert command("federate", "plan", "plain.toml", "--set=run.steps=1")[0] == 2


def test_rounds_are_listed_inspected_and_exported(command, federate, tmp_path):
    run = federate("r", federation__server__name="fednesterov")
    code, out, _ = command("federate", "rounds", "list", run, "--json")
    assert [(row["round"], row["step"], row["problems"]) for row in json.loads(out)] == [
        (number, 2 * number, []) for number in range(1, 5)
    ]
    code, out, _ = command("federate", "rounds", "inspect", run, "--round", "-2", "--json")
    found = json.loads(out)
    assert (code, found["round"], found["tensors"]["server_momentum"]) == (0, 3, 12)
    assert [client["batch"] for client in found["clients"]] == [6] * 4
    assert command("federate", "rounds", "export", run, "out", "--round", "2")[0] == 0
    assert command("checkpoint", "verify", "out")[0] == 0
    # An ordinary run starts from the weights, whatever the federation.
    code, _, errors = command("run", "plain.toml", "--set=run.steps=1", "--set=optimizer.lr=0.0",
                              "--set=run.init_from=out", "--set=run.name=next")  # fmt: skip
    assert code == 0, errors
    assert_equal(tensors(tmp_path / "runs/next", 1, "model."), tensors(run, 4, "model."))
    code, _, errors = command("federate", "rounds", "inspect", run, "--round", "9")
    assert code == 2
    assert "there are 1, 2, 3, 4" in errors
    assert command("federate", "rounds", "list", tmp_path / "runs/next")[0] == 5


def test_a_run_starts_from_the_weights_of_an_ordinary_one(command, federate, tmp_path):
    assert command("run", "plain.toml", "--set=run.steps=3", "--set=run.name=plain")[0] == 0
    run = federate("r", federation__rounds=1, optimizer__lr=0.0, run__init_from="runs/plain")
    plain = tensors(tmp_path / "runs/plain", 3, "model.")
    assert_equal(tensors(run, 2, "model."), plain)


def start(folder, name, settings):
    """Start a run in a process of its own, and return it once a client has trained."""
    words = [f"--set={key.replace('__', '.')}={value}" for key, value in settings.items()]
    line = [sys.executable, "-P", "-m", "trainer", "federate", "run", "recipe.toml", *words]
    run = subprocess.Popen([*line, f"--set=run.name={name}"], cwd=folder, env=os.environ,
                           stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)  # fmt: skip
    for text in run.stdout:
        if text.startswith("client "):
            break
    return run


@pytest.mark.slow
@pytest.mark.matrix
def test_a_run_that_is_killed_resumes_as_if_it_had_not_been(tmp_path, federate):
    settings = {"federation__rounds": 12, "federation__server__name": "fednesterov"}
    whole = federate("whole", **settings)
    delays = random.Random(0)
    for _ in range(4):
        run = start(tmp_path, "killed", settings)
        time.sleep(delays.random() * 0.3)
        run.send_signal(signal.SIGKILL)
        run.communicate()
    killed = federate("killed", **settings)
    assert_equal(tensors(killed, 24), tensors(whole, 24))
    assert rows(killed, "round") == rows(whole, "round")


@pytest.mark.slow
@pytest.mark.parametrize("interval", [1, *also(1000)])
def test_a_signal_stops_a_run_between_two_rounds(tmp_path, federate, interval):
    # With each round saved, a round that is under way is given up; else it is completed.
    settings = {"federation__rounds": 40, "checkpoint__interval": interval}
    whole = federate("whole", **settings)
    run = start(tmp_path, "stopped", settings)
    time.sleep(0.5)
    run.send_signal(signal.SIGTERM)
    out, _ = run.communicate()
    assert run.returncode == 75, out
    assert "saved; run again to resume" in out or "stopped at once" in out
    stopped = federate("stopped", **settings)
    assert_equal(tensors(stopped, 80), tensors(whole, 80))
    assert rows(stopped, "client") == rows(whole, "client")
