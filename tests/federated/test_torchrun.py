"""Clients as parts of one job's ranks, against the same clients in turn."""

import shutil

import pytest

from tests.federated.conftest import assert_equal, rows, tensors

pytestmark = pytest.mark.matrix
ADMISSION = {"federation__admission__max_norm_ratio": 3}
NESTEROV = {"federation__server__name": "fednesterov"}
FRAGMENTS = {"federation__fragments__count": 2, "federation__fragments__delay": 1,
             "federation__fragments__mixing": 0.5}  # fmt: skip
VARIANTS = {
    "mean": (2, NESTEROV),
    "drawn": (3, {"federation__clients_per_round": 2, **NESTEROV}),
    "alone": (2, {"federation__clients_per_round": 1}),
    "topk": (2, {"federation__compression__name": "topk", **NESTEROV}),
    "int8": (3, {"federation__compression__name": "int8", "federation__clients_per_round": 2}),
    "median": (3, {"federation__merge__name": "median", **ADMISSION}),
    "fragments": (2, FRAGMENTS),
    "buffers": (2, {"model__name": "deepseek_v3", "model__flavor": "debug"}),
}


def compare(command, tmp_path, name, clients, ranks, settings):
    """Run a recipe in turn and at once, and compare all tensors and the rows of clients."""
    words = [f"--set={key.replace('__', '.')}={value}" for key, value in settings.items()]
    words += [f"--set=federation.clients={clients}", "--set=federation.rounds=3"]
    runs = []
    for carrier, nproc in (("local", ranks), ("torchrun", clients * ranks)):
        run = f"{name}-{carrier}"
        code, out, errors = command(
            "federate", "run", "recipe.toml", *words, f"--set=federation.carrier={carrier}",
            f"--set=run.name={run}", *["--nproc", str(nproc)] * (nproc > 1),
        )  # fmt: skip
        assert code == 0, out + errors
        runs.append(tmp_path / "runs" / run)
    one, other = runs
    assert_equal(tensors(one, 6), tensors(other, 6))
    for kind in ("client", "round"):
        left_out = {"bytes_sent", "bytes_received"}
        one_rows, other_rows = (
            [{key: row[key] for key in row.keys() - left_out} for row in rows(run, kind)]
            for run in runs
        )
        assert one_rows == other_rows
    return runs


@pytest.mark.parametrize("name", VARIANTS)
def test_clients_at_once_are_clients_in_turn_bit_for_bit(command, tmp_path, name):
    compare(command, tmp_path, name, VARIANTS[name][0], 1, VARIANTS[name][1])


@pytest.mark.parametrize("name", ["mean", "topk"])
def test_sharded_clients_at_once_are_sharded_clients_in_turn(command, tmp_path, name):
    settings = {**VARIANTS[name][1], "parallel__shard": 2}
    compare(command, tmp_path, name, 2, 2, settings)


def train(command, tmp_path, name, *words, clients=2, code=0):
    """Run clients at once, and return the run directory and what was printed."""
    found, out, errors = command(
        "federate", "run", "recipe.toml", f"--set=run.name={name}", "--set=federation.rounds=3",
        f"--set=federation.clients={clients}", "--set=federation.server.name=fednesterov",
        "--set=federation.compression.name=topk", *words,
    )  # fmt: skip
    assert found == code, out + errors
    return tmp_path / "runs" / name, errors


TORCHRUN = "--set=federation.carrier=torchrun"


@pytest.mark.parametrize("carrier", ["torchrun", "local"])
def test_a_run_that_resumes_is_the_undisturbed_one_with_either_carrier(command, tmp_path, carrier):
    whole, _ = train(command, tmp_path, "whole", TORCHRUN, "--nproc=2")
    run = whole.with_name("resumed")
    shutil.copytree(whole, run, symlinks=True)
    for step in (4, 6):
        shutil.rmtree(run / "checkpoints" / f"step-{step:08d}")
    nproc = ["--nproc=2"] * (carrier == "torchrun")
    train(command, tmp_path, "resumed", f"--set=federation.carrier={carrier}", *nproc)
    assert_equal(tensors(run, 6), tensors(whole, 6))
    losses = [[row["loss"] for row in rows(each, "client")] for each in (run, whole)]
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    ("fault", "ranks"),
    [
        ("federation.exchange:rank1:step2", 1),
        ("federation.exchange:rank0:step2", 1),
        ("train.step:rank1:step4", 2),
        ("checkpoint.before_rename:rank0:step4", 1),
    ],
)
def test_a_killed_rank_stops_the_run_which_then_resumes_bit_for_bit(
    command, tmp_path, monkeypatch, fault, ranks
):
    words = [TORCHRUN, f"--nproc={2 * ranks}"]
    whole, _ = train(command, tmp_path, "whole", *words)
    monkeypatch.setenv("TRAINER_FAULT", f"{fault}:kill")
    run, errors = train(command, tmp_path, "killed", *words, code=1)
    assert "SIGKILL" in errors
    assert not (run / "checkpoints" / "step-00000004").exists()
    monkeypatch.delenv("TRAINER_FAULT")
    train(command, tmp_path, "killed", *words)
    assert_equal(tensors(run, 6), tensors(whole, 6))
    assert rows(run, "round") == rows(whole, "round")


def test_clients_need_equally_many_ranks(command):
    code, _, errors = command("federate", "run", "recipe.toml", TORCHRUN, "--nproc=6")
    assert code == 2
    assert "4 clients of equally many ranks cannot share 6" in errors
    assert "--nproc 8" in errors
