"""Rounds that are validated, edited, branched, pruned and exported with moments."""

import json
import os
import time

import pytest
import torch

from tests.federated.conftest import assert_equal, rows, tensors
from tests.federated.test_commands import start
from trainer.engine.checkpoint.manifest import read_manifest
from trainer.engine.federated.change_rounds import prune_rounds


def damage(run, step):
    """Change a byte of a round's tensors."""
    file = next((run / "checkpoints" / f"step-{step:08d}").glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def test_rounds_are_validated_and_pruned_to_the_last_intact_one(command, federate):
    run = federate("r")
    assert command("federate", "rounds", "validate", run)[0] == 0
    damage(run, 8)
    code, out, _ = command("federate", "rounds", "validate", run, "--json")
    assert code == 5
    found = json.loads(out)
    assert [bool(found[str(number)]) for number in range(1, 5)] == [False, False, False, True]
    # The newest is damaged: the one before it is the last intact one.
    assert command("federate", "rounds", "prune", run, "--keep", "1")[0] == 0
    assert [each.name for each in (run / "checkpoints").glob("step-*")] == ["step-00000006"]
    assert os.readlink(run / "checkpoints" / "latest") == "step-00000006"
    damage(run, 6)
    assert prune_rounds(run, 1) == []
    assert (run / "checkpoints" / "step-00000006").is_dir()


def test_an_edited_round_has_a_backup_and_the_run_resumes_from_it(command, federate):
    settings = {"federation__compression__name": "int8", "federation__rounds": 4}
    run = federate("r", **settings)
    before = tensors(run, 4)
    code, out, errors = command("federate", "rounds", "edit", run, "--round", "2",
                                "--reset-client", "1")  # fmt: skip
    assert code == 0, errors
    (backup,) = (run / "checkpoints").glob("backup-*")
    assert str(backup) in out
    assert os.readlink(run / "checkpoints" / "latest") == "step-00000004"
    assert read_manifest(backup).extra["federation"]["clients"][1]["last_round"] == 2
    assert not [name for name in tensors(run, 4) if name.startswith("client1_exp")]
    assert_equal(tensors(run, 4, "client0_"), {n: t for n, t in before.items() if "client0_" in n})
    assert [each.name for each in sorted((run / "checkpoints").glob("step-*"))] == [
        "step-00000002", "step-00000004"
    ]  # fmt: skip
    federate("r", **settings)
    assert tensors(run, 8)["client1_step.embed.weight"] == 4
    assert tensors(run, 8)["client0_step.embed.weight"] == 8
    assert command("federate", "rounds", "validate", run)[0] == 0
    code, _, errors = command("federate", "rounds", "edit", run, "--reset-client", "9")
    assert code == 2
    assert "no such client" in errors


def test_the_number_of_a_round_is_set(command, federate):
    run = federate("r", federation__rounds=2)
    assert command("federate", "rounds", "edit", run, "--set-round", "7")[0] == 0
    out = command("federate", "rounds", "list", run, "--json")[1]
    assert [(row["round"], row["step"]) for row in json.loads(out)] == [(1, 2), (7, 14)]
    run = federate("r", federation__rounds=8)
    assert rows(run, "round")[-1]["round"] == 8


def test_a_branch_is_a_run_that_resumes_from_the_round(command, federate, tmp_path):
    whole = federate("whole")
    code, _, errors = command("federate", "rounds", "branch", whole, "runs/branch", "--round", "2")
    assert code == 0, errors
    code, _, errors = command("federate", "run", "runs/branch")
    assert code == 0, errors
    assert_equal(tensors(tmp_path / "runs" / "branch", 8), tensors(whole, 8))
    assert command("federate", "rounds", "branch", whole, "runs/branch")[0] == 2


def test_an_ordinary_run_resumes_from_an_export_with_moments(command, federate, tmp_path):
    run = federate("r", federation__rounds=2)
    assert command("federate", "rounds", "export", run, "out", "--with-moments")[0] == 0
    found = tensors(run, 4)
    words = ["--set=run.steps=5", "--set=run.resume=./out", "--set=run.name=next"]
    words += ["--allow-changed=federation", "--set=optimizer.lr=0.0"]
    words[-2] += ",optimizer.lr,run.steps"
    code, _, errors = command("run", "plain.toml", *words)
    assert code == 0, errors
    resumed = tensors(tmp_path / "runs" / "next", 5)
    # A rate of 0 leaves the weights; the first moment is b1 m + (1 - b1) g, so that it has moved.
    assert_equal({n: t for n, t in resumed.items() if n.startswith("model.")},
                 tensors(run, 4, "model."))  # fmt: skip
    assert resumed["optimizer.embed.weight.step"] == 5
    exported = read_manifest(tmp_path / "out")
    assert exported.contents == "full"
    mean = torch.stack([found[f"client{c}_exp_avg_sq.embed.weight"].double() for c in range(4)])
    after = resumed["optimizer.embed.weight.exp_avg_sq"].double()
    # The second moment keeps 0.95 of the mean, and adds 0.05 of a square.
    assert (after - 0.95 * mean.mean(0) >= -1e-11).all()
    code, _, errors = command("federate", "rounds", "export", federate(
        "reset", federation__client_optimizer="reset"), "none", "--with-moments")  # fmt: skip
    assert code == 5
    assert "has no optimizer states" in errors


def test_status_names_each_clients_newest_round(command, federate, tmp_path):
    run = federate("r", federation__clients_per_round=2)
    code, out, _ = command("federate", "status", run, "--json")
    assert code == 0
    found = json.loads(out)
    drawn = [row["client"] for row in rows(run, "client")]
    assert found["rounds_of"] == {name: drawn.count(name) for name in dict.fromkeys(drawn)}
    assert found["bytes_sent"] == sum(row["bytes_sent"] for row in rows(run, "round"))
    assert found["round"]["round"] == 4
    assert "finished" in command("federate", "status", run)[1]
    assert "is not running" in command("federate", "stop", run)[1]
    assert command("federate", "status", tmp_path)[0] == 2


@pytest.mark.slow
@pytest.mark.matrix
def test_a_run_is_stopped_between_two_rounds(command, federate, tmp_path):
    settings = {"federation__rounds": 400}
    run = start(tmp_path, "stopped", settings)
    metrics = tmp_path / "runs/stopped/metrics.jsonl"
    try:
        while not (metrics.exists() and '"kind": "round"' in metrics.read_text()):
            assert run.poll() is None, "ended before its first round did"
            time.sleep(0.05)
        code, out, errors = command("federate", "stop", tmp_path / "runs" / "stopped")
        assert code == 0, errors
        assert "has stopped" in out
        assert run.wait(60) == 75
    finally:
        run.kill()
        run.communicate()
