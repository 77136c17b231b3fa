"""Replica groups of an ordinary run as clients, against clients in turn."""

import pytest

from tests.federated.conftest import PLAIN, assert_equal, rows, tensors
from trainer.engine.checkpoint.manifest import read_manifest

JOB = (
    PLAIN.replace("global_batch = 4", "global_batch = 8")
    + """\
[parallel]
replicate = 2
[federation]
carrier = "job"
local_steps = 2
[federation.server]
name = "fednesterov"
"""
)


@pytest.mark.matrix
@pytest.mark.parametrize("ranks", [1, 2])
def test_replica_groups_are_clients_in_turn_bit_for_bit(command, tmp_path, ranks):
    (tmp_path / "job.toml").write_text(JOB)
    words = ["--set=run.name=job", f"--nproc={2 * ranks}", "--set=optimizer.lr=0.01"]
    assert command("run", "job.toml", *words, "--set=run.steps=4")[0] == 0
    # It resumes with more steps, as any run does.
    code, out, errors = command("run", "job.toml", *words, "--set=run.steps=6")
    assert code == 0, out + errors
    nproc = [f"--nproc={ranks}"] * (ranks > 1)
    code, out, errors = command(
        "federate", "run", "recipe.toml", "--set=federation.clients=2", "--set=federation.rounds=3",
        "--set=federation.server.name=fednesterov", "--set=optimizer.lr=0.01", *nproc,
    )  # fmt: skip
    assert code == 0, out + errors
    job, turns = tmp_path / "runs" / "job", tmp_path / "runs" / "r"
    assert_equal(tensors(job, 6), tensors(turns, 6))
    assert rows(job, "round") == rows(turns, "round")
    folders = (run / "checkpoints" / "step-00000006" for run in (job, turns))
    assert [read_manifest(folder).samples for folder in folders] == [48, 48]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["federation.rounds=3"], "federation.rounds"),
        (["federation.clients=2"], "parallel.replicate is the number of clients"),
        (["parallel.replicate=1"], "parallel.replicate"),
        (["run.steps=5"], "is no multiple of federation.local_steps (2)"),
    ],
)
def test_keys_that_replica_groups_cannot_use_are_refused(command, tmp_path, changes, message):
    (tmp_path / "job.toml").write_text(JOB)
    words = [f"--set={change}" for change in ["run.steps=6", *changes]]
    code, _, errors = command("validate", "job.toml", *words)
    assert code == 2
    assert message in errors


def test_each_command_names_the_one_that_trains_with_the_carrier(command, tmp_path):
    (tmp_path / "job.toml").write_text(JOB)
    code, _, errors = command("federate", "run", "job.toml", "--set=run.steps=6", "--nproc=2")
    assert code == 2
    assert "run it with `trainer run`" in errors
