"""Clients in worker processes, against the same clients in turn."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from multiprocessing import Pipe
from pathlib import Path

import pytest
import torch

from tests.commands import run_trainer
from tests.federated.conftest import RECIPE, assert_equal, rows, tensors
from trainer.engine.core.errors import DataError, TrainerError
from trainer.engine.federated.carriers.process_carrier import MOST_DEATHS, read_error
from trainer.engine.federated.workers.mailbox import Mailbox, create_memory
from trainer.engine.federated.workers.worker import describe_error

NESTEROV = {"federation__server__name": "fednesterov"}
KINDS = ("client", "round", "eval")
MOE = {"model__name": "qwen3", "model__flavor": "moe_debug"}
BIASED = {"model__name": "deepseek_v3", "model__flavor": "debug"}
SCHEDULE = """
[[federation.states]]
state = "exp_avg"
interval = 2
[[federation.states]]
state = "parameters"
match = "*norm*.weight"
interval = 2
[[federation.layers]]
match = "head.*"
policy = "personal"
[[federation.layers]]
match = "embed.*"
policy = "random"
interval = 2
"""
LATE = """
[federation.late]
policy = "stale"
quorum = 2
[federation.trace]
spread = 0.5
jitter = 0.3
failure = 0.2
recovery_seconds = 0.1
"""
VARIANTS = {
    "topk": {"federation__compression__name": "topk", **NESTEROV},
    "drawn": {"federation__clients_per_round": 2, "federation__merge__name": "median"},
    "aggregate": {"federation__client_optimizer": "aggregate", "evaluate__interval": 2},
    "reset": {"federation__client_optimizer": "reset", "data__workers": 1, "lora__rank": 2},
    "fragments": {"federation__fragments__count": 2, "federation__fragments__delay": 1,
                  "federation__fragments__mixing": 0.5},
    "averaged buffers": {**BIASED, "optimizer__name": "muon"},
    "local buffers": {**BIASED, "federation__buffers": "local"},
    "frozen buffers": {**BIASED, "federation__buffers": "freeze"},
    "experts": {**MOE, "federation__experts__assignment": "random",
                "federation__experts__overlap": 2.0, "federation__client_optimizer": "aggregate"},
    "documents": {"federation__partition": "documents", "ema__decay": 0.9},
    "schedule": {"federation__client_optimizer": "schedule"},
    "late": {"federation__rounds": 6},
}  # fmt: skip
TABLES = {"schedule": SCHEDULE, "late": LATE}


def kill_a_worker(run, after, kills=1):
    """Kill workers of this process's run once metrics.jsonl has so many rows; return their ids."""

    def find_workers():
        """Return the ids of running workers; a killed one is absent until it starts again."""
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        found = []
        for child in map(int, children):
            with suppress(FileNotFoundError, ProcessLookupError):  # it has ended just now
                if b"federated.workers.worker" in Path(f"/proc/{child}/cmdline").read_bytes():
                    found.append(child)
        return found

    def watch():
        for count in range(kills):
            metrics = run / "metrics.jsonl"
            while not metrics.exists() or metrics.read_bytes().count(b"\n") < after + 3 * count:
                time.sleep(0.005)
            while not (workers := find_workers()):
                time.sleep(0.005)
            victim = workers[count % len(workers)]
            killed.append(victim)
            os.kill(victim, signal.SIGKILL)

    killed = []
    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return killed


def compare(one, other, step):
    """Compare checkpoints bit for bit, and the rows of clients, rounds and evaluations."""
    assert_equal(tensors(one, step), tensors(other, step))
    for kind in KINDS:
        found = [{k: row[k] for k in row if k != "restarts"} for row in rows(other, kind)]
        assert rows(one, kind) == found


def test_two_processes_train_as_one(federate):
    whole = federate("whole", **NESTEROV, evaluate__interval=4)
    compare(whole, federate("two", **NESTEROV, evaluate__interval=4, federation__processes=2), 8)


@pytest.mark.matrix
def test_a_killed_worker_begins_its_client_s_round_again(federate, tmp_path):
    settings = {"federation__local_steps": 12, **NESTEROV}
    whole = federate("whole", **settings)
    killed = kill_a_worker(tmp_path / "runs" / "killed", after=6)
    run = federate("killed", federation__processes=2, **settings)
    compare(whole, run, 48)
    assert [row.get("restarts", 0) for row in rows(run, "client")].count(1) <= len(killed) == 1
    assert not list(run.glob("**/*.tmp"))


def test_a_mailbox_carries_every_dtype_and_grows():
    ours, theirs = Pipe()
    memory = create_memory()
    mailboxes = [
        Mailbox(pipe, file, torch.device("cpu"))
        for pipe, file in ((ours, memory), (theirs, os.dup(memory)))
    ]
    for size in (3, 100_000, 7):
        values = torch.randn(2, size, generator=torch.Generator().manual_seed(size))
        sent = {
            "fp32": values,
            "transposed": values.T,
            "bf16": values.bfloat16(),
            "scalar": values[0, 0],
            "empty": values[:, :0],
            "int64": values.long(),
            "bool": values > 0,
        }
        mailboxes[0].send({"number": float("nan"), "words": ["a"]}, sent)
        message, received = mailboxes[1].receive()
        assert message["words"] == ["a"]
        assert message["number"] != message["number"]
        mailboxes[1].send({}, {"fp32": values * 2})  # what was received is a copy
        assert torch.equal(mailboxes[0].receive()[1]["fp32"], values * 2)
        assert_equal(received, sent)
    for mailbox in mailboxes:
        mailbox.close()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"federation.processes": 5}, "(5) is more than the 4 clients of a round"),
        ({"federation.carrier": "torchrun"}, 'is unsupported with carrier = "torchrun"'),
        ({"parallel.tensor": 2}, "is unsupported with 2 ranks a client"),
    ],
)
def test_processes_that_are_unsupported_are_refused_by_name(command, settings, message):
    words = [f"--set={key}={value}" for key, value in settings.items()]
    code, out, errors = command("validate", "recipe.toml", "--set=federation.processes=2", *words)
    assert code == 2
    assert "federation.processes" in out + errors
    assert message in out + errors


def test_processes_and_ranks_exclude_one_another(command):
    words = ["--set=federation.processes=2", "--nproc=2"]
    code, _, errors = command("federate", "run", "recipe.toml", *words)
    assert code == 2
    assert "worker processes train clients of one rank, not 2" in errors


@pytest.mark.matrix
@pytest.mark.parametrize("name", VARIANTS)
def test_clients_in_processes_are_clients_in_turn_bit_for_bit(federate, tmp_path, name):
    (tmp_path / "recipe.toml").write_text(RECIPE + TABLES.get(name, ""))
    settings = {**VARIANTS[name]}
    in_turn = federate("turn", **settings)
    run = federate("processes", federation__processes=3 - ("drawn" in name), **settings)
    compare(in_turn, run, 2 * len(rows(run, "round")))


@pytest.mark.matrix
@pytest.mark.parametrize("first", [1, 2])
def test_a_run_may_change_its_processes_when_it_resumes(federate, first):
    whole = federate("whole", **NESTEROV, federation__compression__name="int8")
    run = federate("r", **NESTEROV, federation__compression__name="int8",
                   federation__processes=first)  # fmt: skip
    for step in (4, 6, 8):
        shutil.rmtree(run / "checkpoints" / f"step-{step:08d}")
    federate("r", **NESTEROV, federation__compression__name="int8",
             federation__processes=3 - first)  # fmt: skip
    compare(whole, run, 8)


@pytest.mark.matrix
def test_many_killed_workers_change_nothing(federate, tmp_path):
    settings = {"federation__local_steps": 20, "federation__compression__name": "topk"}
    whole = federate("whole", **settings)
    killed = kill_a_worker(tmp_path / "runs" / "killed", after=2, kills=5)
    run = federate("killed", federation__processes=2, **settings)
    compare(whole, run, 80)
    assert len(killed) == 5


@pytest.mark.matrix
def test_a_client_whose_workers_always_die_ends_the_run(command, monkeypatch):
    monkeypatch.setenv("TRAINER_FAULT", "train.step:step4:kill")
    words = ["--set=federation.processes=2", "--set=run.name=dies"]
    code, out, errors = command("federate", "run", "recipe.toml", *words)
    assert code == 1
    assert "died of SIGKILL while it trained client" in out + errors
    assert f"for the {MOST_DEATHS}th time in this round" in errors
    monkeypatch.delenv("TRAINER_FAULT")
    assert command("federate", "run", "recipe.toml", *words)[0] == 0


@pytest.mark.matrix
def test_an_error_in_a_worker_is_the_run_s_error(command, tmp_path):
    words = ["--set=run.name=diverges", "--set=optimizer.lr=1e30"]
    expected = command("federate", "run", "recipe.toml", *words)
    shutil.rmtree(tmp_path / "runs" / "diverges")
    found = command("federate", "run", "recipe.toml", *words, "--set=federation.processes=2")
    assert found[0] == expected[0] == 6
    assert found[2] == expected[2]
    assert not (tmp_path / "runs" / "diverges" / "checkpoints" / "step-00000002").exists()


def test_an_error_of_a_plugin_reaches_the_server_as_the_class_of_ours_below_it():
    class Unlicensed(DataError):
        """Of a plugin, which the server does not import."""

    found = read_error(describe_error(Unlicensed("no licence", "buy one")))
    assert (type(found), found.message, found.hint) == (DataError, "no licence", "buy one")
    assert type(read_error(describe_error(OSError("no disk")))) is TrainerError
    for name in ("Unlicensed", "ExitCode", "annotations"):
        found = read_error({"error": name, "text": "no licence", "hint": "buy one"})
        assert (type(found), found.message, found.hint) == (TrainerError, "no licence", "buy one")


@pytest.mark.matrix
def test_a_worker_imports_plugins_and_finds_them_beside_the_recipe(tmp_path):
    (tmp_path / "recipe.toml").write_text('plugins.modules = ["own"]\n' + RECIPE)
    (tmp_path / "own.py").write_text(
        "from typing import Literal\n"
        "from trainer.plugins import ServerOptimizerConfig, server_optimizers\n"
        "@server_optimizers.register\n"
        "class Sign(ServerOptimizerConfig):\n"
        '    """Moves each weight by the sign."""\n'
        '    name: Literal["sign"] = "sign"\n'
        "    def update(self, weight, gradient, state, step):\n"
        "        weight.sub_(gradient.sign(), alpha=1e-3)\n"
    )
    words = ["--set=federation.server.name=sign", "--set=federation.rounds=2"]
    for processes in (1, 2):
        own = [f"--set=federation.processes={processes}", f"--set=run.name=p{processes}"]
        line = ["federate", "run", "recipe.toml", *words, *own]
        done = run_trainer(*line, folder=tmp_path)
        assert done.returncode == 0, done.stderr
    compare(tmp_path / "runs" / "p1", tmp_path / "runs" / "p2", 4)


@pytest.mark.matrix
def test_workers_end_with_a_killed_server(tmp_path):
    """Kill the server of a run in a process of its own: its workers end within seconds."""
    (tmp_path / "recipe.toml").write_text(RECIPE)
    line = [sys.executable, "-P", "-m", "trainer", "federate", "run", "recipe.toml"]
    line += ["--set=federation.processes=2", "--set=federation.local_steps=400"]
    server = subprocess.Popen(line, cwd=tmp_path, stdout=subprocess.DEVNULL)
    children = Path(f"/proc/{server.pid}/task/{server.pid}/children")
    deadline = time.monotonic() + 60
    while len(workers := children.read_text().split()) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    server.kill()
    server.wait()
    assert len(workers) == 2
    while any(Path(f"/proc/{each}/cmdline").exists() for each in workers):
        assert time.monotonic() < deadline
        time.sleep(0.05)
