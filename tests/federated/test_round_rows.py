"""Numbers of rounds: the noise scale, cosines between clients, plots and trackers."""

import numpy as np
import pytest
import torch

from tests.federated.conftest import rows, tensors
from trainer.engine.core.errors import ExitCode
from trainer.engine.federated import rounds
from trainer.engine.federated.rounds import _RoundLog
from trainer.engine.launch import ending
from trainer.engine.launch.signals import StopRequested
from trainer.engine.report.page import write_page


def test_the_noise_scale_is_that_of_the_distribution():
    """Draw clients around a known pseudo-gradient: |G|^2 = 4, S = 36, so that the scale is 9."""
    rng = np.random.default_rng(0)
    weights, found = np.array([1.0, 2.0, 1.0, 4.0]), []
    for _ in range(300):
        drawn = np.full(400, 0.1) + rng.normal(size=(4, 400)) * 0.3
        log = _RoundLog(1, 1)
        norms = np.linalg.norm(drawn, axis=1)
        for weight, norm in zip(weights, norms, strict=True):
            arrival = type("A", (), {"weight": weight, "norm": norm, "rejected": ""})
            log.updates.append(type("U", (), {"arrival": arrival})())
        mean = np.average(drawn, axis=0, weights=weights)
        found.append(log.estimate_noise(np.linalg.norm(mean))["noise_scale"])
    assert np.median(found) == pytest.approx(9, rel=0.05)
    assert _RoundLog(1, 1).estimate_noise(1.0) == {}


def test_a_run_that_ended_in_its_first_round_evaluates_the_initial_weights_once(
    command, federate, monkeypatch
):
    settings = {"federation__rounds": 2, "evaluate__interval": 2, "evaluate__steps": 1}
    whole = federate("whole", **settings)
    words = [f"--set={key.replace('__', '.')}={value}" for key, value in settings.items()]
    for point in ("train.step:step1:raise", "train.step:step2:raise"):
        monkeypatch.setenv("TRAINER_FAULT", point)
        code, _, errors = command("federate", "run", "recipe.toml", "--set=run.name=failed", *words)
        assert (code, "fault 'raise'" in errors) == (1, True)
    monkeypatch.delenv("TRAINER_FAULT")
    failed = federate("failed", **settings)
    assert [row["step"] for row in rows(failed, "eval")] == [0, 2, 4]
    for kind in ("eval", "client", "round"):
        assert rows(failed, kind) == rows(whole, kind)


def test_a_signal_during_the_first_evaluation_stops_the_run_at_once(command, monkeypatch):
    words = ["federate", "run", "recipe.toml", "--set=evaluate.interval=2"]
    with monkeypatch.context() as patch:
        patch.setattr(rounds, "evaluate_splits", give_up)
        patch.setattr(ending, "skip_teardown", lambda: None)  # it would end this process
        code, out, errors = command(*words)
    assert code == ExitCode.INTERRUPTED
    assert "nothing was saved" in out + errors
    assert command(*words)[0] == 0


def give_up(*arguments):
    raise StopRequested


def test_cosines_are_those_of_the_clients_updates(federate):
    plain = federate("plain", federation__rounds=1)
    run = federate("r", federation__rounds=1, federation__cosines="true")
    found = rows(run, "client")
    for row in found:
        others = {name for name in row if name.startswith("cosine/")}
        assert others == {f"cosine/{n}" for n in range(4)} - {f"cosine/{row['client']}"}
        assert all(-1 <= row[name] <= 1 for name in others)
    # |mean|^2 of equal weights follows from norms and cosines.
    norms = [row["norm"] for row in found]
    square = sum(
        norms[i] * norms[j] * (1.0 if i == j else found[i][f"cosine/{j}"])
        for i in range(4)
        for j in range(4)
    )
    (row,) = rows(run, "round")
    assert row["pseudo_gradient_norm"] == pytest.approx(square**0.5 / 4, rel=1e-5)
    for name, tensor in tensors(plain, 2, "model.").items():
        assert torch.equal(tensor, tensors(run, 2)[name])


def test_the_report_and_the_trackers_show_rounds_and_clients(federate):
    pytest.importorskip("tensorboard")
    run = federate("r", federation__rounds=2, metrics__tensorboard="true")
    page = write_page([run])
    for title in ("Pseudo-gradient norm", "Noise scale of pseudo-gradients", "Bytes of a round"):
        assert title in page
    assert list((run / "tensorboard").glob("*tfevents*"))
    for client in range(4):
        assert list((run / "clients" / f"r-{client}" / "tensorboard").glob("*tfevents*"))
