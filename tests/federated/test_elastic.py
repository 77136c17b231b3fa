"""Replica groups that are jobs of their own: without faults as one job, with faults as documented.

A group that is away for some rounds is a client that is not drawn in them: it keeps its optimizer
and its place in its data. So clients in turn, with the rounds of each given, are the oracle.
"""

import signal
import sys

import pytest

from tests.federated.conftest import PLAIN, assert_equal, rows, tensors
from tests.federated.elastic_groups import Groups
from trainer.engine.checkpoint.manifest import read_manifest
from trainer.engine.core.errors import EnvironmentFault
from trainer.engine.federated import rounds
from trainer.engine.federated.elastic import torchft_quorum

ELASTIC = (
    PLAIN.replace("global_batch = 4", "global_batch = 12")
    + """\
[ema]
decay = 0.9
[optimizer]
lr = 0.01
[parallel]
replicate = 3
[federation]
carrier = "elastic"
local_steps = 2
[federation.server]
name = "fednesterov"
[federation.elastic]
join_seconds = 600
"""
).replace("interval = 1\n", 'interval = 1\nmode = "sync"\n')
SHARED = ("model.", "server_", "ema.")


@pytest.fixture
def groups(tmp_path):
    """Yield what starts replica groups of the recipe in the test's folder."""
    pytest.importorskip("torchft")
    from torchft.coordination import LighthouseServer

    # It waits for all groups that live, however slow they are.
    server = LighthouseServer(
        bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=600_000, heartbeat_timeout_ms=10_000
    )
    (tmp_path / "elastic.toml").write_text(ELASTIC)
    groups = Groups(tmp_path, server)
    yield groups
    groups.stop()
    server.shutdown()


def union(tmp_path, numbers, step):
    """Return the tensors of several groups' checkpoints, after comparing what all have."""
    runs = [tmp_path / "runs" / f"r-replica-{number}" for number in numbers]
    found = [tensors(run, step) for run in runs]
    for one in found[1:]:
        shared = [
            {name: tensor for name, tensor in each.items() if name.startswith(SHARED)}
            for each in (found[0], one)
        ]
        assert_equal(*shared)
    return {name: tensor for each in found for name, tensor in each.items()}


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("ranks", "compression"), [(1, "none"), (1, "topk"), (2, "none"), (2, "int8")]
)
def test_without_faults_groups_are_one_job_bit_for_bit(
    command, tmp_path, groups, ranks, compression
):
    words = ["--set=parallel.replicate=2", "--set=data.global_batch=8", "--set=run.steps=6"]
    words += [f"--set=federation.compression.name={compression}"]
    # The second time they resume, all from the same round.
    for steps in (["--set=run.steps=4"], [])[ranks > 1 :]:
        for number in (0, 1):
            groups.start(number, *words, *steps, nproc=ranks)
        assert [groups.finish(number) for number in (0, 1)] == [0, 0], groups.log(1)
    code, out, errors = command(
        "run", "elastic.toml", *words, "--set=federation.carrier=job", "--set=run.name=job",
        f"--nproc={2 * ranks}",
    )  # fmt: skip
    assert code == 0, out + errors
    job = tmp_path / "runs" / "job"
    found, whole = union(tmp_path, (0, 1), 6), tensors(job, 6)
    assert_equal(found, whole)
    for number in (0, 1):
        run = tmp_path / "runs" / f"r-replica-{number}"
        assert rows(run, "round") == rows(job, "round")
        assert rows(run, "client") == rows(job, "client")
    folder = run / "checkpoints" / "step-00000006"
    assert read_manifest(folder).samples == 48


@pytest.mark.matrix
@pytest.mark.parametrize("fault", ["train.step:rank0:step4:kill", "federation.exchange:kill"])
def test_a_killed_group_returns_with_the_state_of_the_others(
    command, tmp_path, groups, monkeypatch, fault
):
    steps = "--set=run.steps=12"
    fault = fault.replace("exchange", "exchange:rank1:step2")
    groups.start(1, steps, fault=fault)
    for number in (0, 2):
        groups.start(number, steps, fault="train.step:rank0:step9:hold")
    assert groups.finish(1) == -9, groups.log(1)
    groups.wait(lambda: groups.is_held(0) and groups.is_held(2))  # three rounds without the third
    groups.start(1, steps)
    groups.wait(lambda: groups.is_known(1))
    groups.release()
    assert [groups.finish(number) for number in range(3)] == [0, 0, 0], groups.log(1)
    assert "received the state after step 8 from replica group 0" in groups.log(1)
    assert "replica groups 0, 2 of 3 are there" in groups.log(0)

    absent = {2, 3, 4, 5}  # in the fifth round it receives the state, and the merged update
    present = lambda table, seed, number: [0, 2] if number in absent else [0, 1, 2]  # noqa: E731
    monkeypatch.setattr(rounds, "sample_clients", present)
    code, out, errors = command(
        "federate", "run", "elastic.toml", "--set=federation.carrier=local", "--set=run.name=turns",
        "--set=parallel.replicate=1", "--set=data.global_batch=4", "--set=federation.clients=3",
        "--set=federation.rounds=6",
    )  # fmt: skip
    assert code == 0, out + errors
    turns = tmp_path / "runs" / "turns"
    assert_equal(union(tmp_path, range(3), 12), tensors(turns, 12))
    left_out = {"bytes_sent", "bytes_received"}
    one, other = (
        [{key: row[key] for key in row.keys() - left_out} for row in rows(run, "round")]
        for run in (turns, tmp_path / "runs" / "r-replica-2")
    )
    assert one == other


@pytest.mark.matrix
def test_a_group_that_missed_rounds_while_it_was_frozen_drops_its_update(tmp_path, groups):
    steps = "--set=run.steps=12"
    groups.start(1, steps, fault="train.step:rank0:step3:stop")
    for number in (0, 2):
        groups.start(number, steps, fault="train.step:rank0:step9:hold")
    groups.wait(lambda: groups.is_held(0) and groups.is_held(2))
    groups.processes[1].send_signal(signal.SIGCONT)
    groups.wait(lambda: groups.num_asking() == 1)  # at the end of its own second round
    groups.release()
    assert [groups.finish(number) for number in range(3)] == [0, 0, 0], groups.log(1)
    assert "received the state after step 8 from replica group 0" in groups.log(1)
    union(tmp_path, range(3), 12)
    found = [
        [row["clients"] for row in rows(tmp_path / "runs" / f"r-replica-{number}", "round")]
        for number in (0, 1)
    ]
    assert found == [[3, 2, 2, 2, 2, 3], [3, 2, 3]]


@pytest.mark.matrix
def test_a_group_that_is_stopped_while_it_waits_resumes(tmp_path, groups):
    words = ["--set=parallel.replicate=2", "--set=data.global_batch=8", "--set=run.steps=6"]
    words += ["--set=federation.elastic.timeout_seconds=15"]  # what the lighthouse still believes
    groups.start(0, *words, fault="train.step:rank0:step3:hold")
    groups.start(1, *words)
    groups.wait(lambda: groups.is_held(0) and groups.num_asking() == 1)
    groups.processes[1].terminate()
    assert groups.finish(1) == 75, groups.log(1)
    groups.start(1, *words)
    groups.wait(lambda: groups.is_known(1))
    groups.release()
    assert [groups.finish(number) for number in (0, 1)] == [0, 0], groups.log(1)
    assert "received the state after step 2 from replica group 0" in groups.log(1)
    union(tmp_path, (0, 1), 6)


@pytest.mark.matrix
def test_a_second_group_of_the_same_number_is_refused(tmp_path, groups):
    words = ["--set=parallel.replicate=2", "--set=data.global_batch=8", "--set=run.steps=4"]
    words += ["--set=federation.elastic.join_seconds=0"]
    groups.start(0, *words, fault="train.step:rank0:step3:hold")
    groups.wait(lambda: groups.is_held(0))
    first = groups.processes[0]
    groups.start(0, *words, "--set=run.dir=others")
    groups.wait(lambda: groups.is_known(0))
    groups.release()
    assert groups.finish(0) == 3, groups.log(0)
    assert "another replica group 0 is there" in groups.log(0)
    groups.processes[0] = first
    assert groups.finish(0) == 0, groups.log(0)


@pytest.mark.matrix
def test_a_group_with_another_recipe_is_refused_and_the_other_trains(tmp_path, groups):
    words = ["--set=parallel.replicate=2", "--set=data.global_batch=8", "--set=run.steps=4"]
    words += ["--set=federation.elastic.join_seconds=0"]
    groups.start(0, *words, fault="train.step:rank0:step3:hold")
    groups.wait(lambda: groups.is_held(0))
    groups.start(1, *words, "--set=optimizer.lr=0.5")
    groups.wait(lambda: groups.is_known(1))
    groups.release()
    assert groups.finish(1) == 2, groups.log(1)
    assert "the recipe differs from that of replica group 0 in optimizer.lr" in groups.log(1)
    assert groups.finish(0) == 0, groups.log(0)
    assert [row["clients"] for row in rows(tmp_path / "runs" / "r-replica-0", "round")] == [1, 1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["federation.fragments.count=2"], "federation.fragments"),
        (["federation.late.quorum=2"], "federation.late"),
        (["federation.trace.failure=0.5"], "federation.late"),
        (["federation.experts.assignment=fixed"], "federation.experts"),
        (["federation.processes=2"], "federation.processes"),
        (["federation.client_optimizer=aggregate"], "federation.client_optimizer"),
        (["federation.rounds=3"], "federation.rounds"),
        (["federation.clients=2"], "parallel.replicate is the number of clients"),
        (["federation.elastic.min_replicas=4"], "more than the 3 replica groups"),
        (["run.steps=5"], "is no multiple of federation.local_steps (2)"),
    ],
)
def test_keys_that_replica_groups_cannot_use_are_refused(command, tmp_path, changes, message):
    (tmp_path / "elastic.toml").write_text(ELASTIC)
    words = [f"--set={change}" for change in ["run.steps=6", *changes]]
    code, _, errors = command("validate", "elastic.toml", *words)
    assert code == 2
    assert message in errors


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({}, "REPLICA_GROUP_ID is not set"),
        ({"REPLICA_GROUP_ID": "3"}, "REPLICA_GROUP_ID is '3', not a number from 0 to 2"),
        ({"REPLICA_GROUP_ID": "0"}, "TORCHFT_LIGHTHOUSE is not set"),
        (
            {"REPLICA_GROUP_ID": "0", "TORCHFT_LIGHTHOUSE": "node:29510"},
            "TORCHFT_LIGHTHOUSE is 'node:29510', not http://HOST:PORT",
        ),
    ],
)
def test_an_environment_that_names_no_group_is_refused(
    command, tmp_path, monkeypatch, environment, message
):
    for name in ("REPLICA_GROUP_ID", "TORCHFT_LIGHTHOUSE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "elastic.toml").write_text(ELASTIC)
    code, _, errors = command("run", "elastic.toml", "--set=run.steps=6")
    assert code == 3
    assert message in errors


def test_a_missing_package_is_named_with_its_extra(command, tmp_path, monkeypatch):
    monkeypatch.setenv("REPLICA_GROUP_ID", "0")
    monkeypatch.setenv("TORCHFT_LIGHTHOUSE", "http://127.0.0.1:1")
    monkeypatch.setitem(sys.modules, "torchft", None)
    (tmp_path / "elastic.toml").write_text(ELASTIC)
    code, _, errors = command("run", "elastic.toml", "--set=run.steps=6")
    assert code == 3
    assert "needs the torchft package" in errors
    assert "[ft]" in errors


def test_a_name_that_does_not_resolve_is_an_error_except_on_one_machine(monkeypatch):
    def fail(*_):
        raise OSError("unknown name")

    monkeypatch.setattr(torchft_quorum.socket, "getaddrinfo", fail)
    monkeypatch.setattr(torchft_quorum.socket, "gethostname", lambda: "nowhere")
    assert torchft_quorum.find_host("http://127.0.0.1:29510") == "127.0.0.1"
    with pytest.raises(EnvironmentFault, match="nowhere, does not resolve"):
        torchft_quorum.find_host("http://lighthouse:29510")
