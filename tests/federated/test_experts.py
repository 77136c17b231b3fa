"""Clients that hold some experts: assignments, masks, means over holders, and optimizer states."""

import json
import shutil

import pytest
import torch

from tests.federated.conftest import RECIPE, assert_equal, rows, tensors
from trainer.engine.federated.carriers.configs import Local
from trainer.engine.federated.experts.subsets import assign_experts
from trainer.engine.federated.experts.tables import ExpertSubsets
from trainer.engine.federated.tables import Federation

MOE = RECIPE.replace("[model]\n", '[model]\nname = "qwen3"\nflavor = "moe_debug"\n')


@pytest.mark.parametrize(("overlap", "holders"), [(1.0, {1}), (1.5, {1, 2}), (4.0, {4})])
@pytest.mark.parametrize("assignment", ["fixed", "random"])
def test_every_expert_has_holders(assignment, overlap, holders):
    table = ExpertSubsets(assignment=assignment, overlap=overlap)
    for number in range(1, 6):
        found = assign_experts(table, 8, range(4), 4, 0, number)
        counts = [sum(expert in mine for mine in found.values()) for expert in range(8)]
        assert set(counts) == holders
        assert {len(mine) for mine in found.values()} == {int(8 * overlap / 4)}
    again = assign_experts(table, 8, range(4), 4, 0, 1)
    assert (again == found) == (assignment == "fixed" or overlap == 4.0)
    # A client keeps its experts although others are not drawn.
    if assignment == "fixed":
        assert assign_experts(table, 8, [1, 3], 4, 0, 9)[3] == found[3]


@pytest.fixture
def watched(monkeypatch, command, tmp_path):
    """Record what each client ends a round with: its weights, moments and tokens of experts."""
    carrier = Local().build(Federation())
    seen = {}
    honest = carrier._weigh

    def weigh(self, result):
        number = len(seen)
        names = {name: each.detach().clone() for name, each in self._server.model.items()}
        moments = {
            name: self._parts.optimizer.state[weight]["exp_avg"].clone()
            for name, weight in self._parts.model.named_parameters()
        }
        held = set(self._experts._held)
        tokens = {layer: each.clone() for layer, each in self._experts._tokens.items()}
        seen[number] = names, moments, held, tokens
        return honest(self, result)

    monkeypatch.setattr(carrier, "_weigh", weigh)
    (tmp_path / "recipe.toml").write_text(MOE)
    return seen


def test_experts_are_averaged_over_their_holders_by_tokens(federate, watched, command):
    """Compute the mean of round 1 by hand, in float64, for weights and for first moments."""
    run = federate("r", federation__experts__assignment="random", federation__experts__overlap=2.0,
                   federation__rounds=1, federation__weighting="uniform",
                   federation__client_optimizer="aggregate", optimizer__lr=0.01)  # fmt: skip
    after = tensors(run, 2)
    first = watched[0][0]
    assert len(watched) == 4
    checked = 0
    for name in first:
        stacked, _, index = name.rpartition(".")
        if ".experts." not in name:
            mean = torch.stack([watched[c][0][name].double() for c in range(4)]).mean(0)
            if f"model.{name}" in after:
                torch.testing.assert_close(after[f"model.{name}"].double(), mean, rtol=0, atol=1e-6)
            continue
        expert, layer = int(index), name.split(".experts.")[0]
        holders = [c for c in range(4) if expert in watched[c][2]]
        weights = torch.stack([watched[c][3][layer][expert] for c in holders]).double()
        for c in set(range(4)) - set(holders):
            assert watched[c][3][layer][expert] == 0, "a token went to an expert that is not held"
        if not weights.sum():
            continue
        checked += 1
        shares = weights / weights.sum()
        mean = sum(s * watched[c][0][name].double() for s, c in zip(shares, holders, strict=True))
        found = after[f"model.{stacked}"][expert].double()
        torch.testing.assert_close(found, mean, rtol=0, atol=1e-6)
        moments = [watched[c][1][stacked][expert].double() for c in holders]
        mean = sum(s * moment for s, moment in zip(shares, moments, strict=True))
        found = after[f"optimizer.{stacked}.exp_avg"][expert].double()
        torch.testing.assert_close(found, mean, rtol=0, atol=1e-7)
    assert checked > 8
    assert_half_of_the_experts_is_sent(run, after, command)


def assert_half_of_the_experts_is_sent(run, after, command):
    """Compare the bytes of a round with weights and two moments, and with the plan."""
    (row,) = rows(run, "round")
    sizes = {name: each.numel() for name, each in after.items() if name.startswith("model.")}
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    trained = sum(size for name, size in sizes.items() if f"optimizer.{name[6:]}.exp_avg" in after)
    saved = sum(sizes.values()) - trained
    biases = sum(size for name, size in sizes.items() if name.endswith("router.bias"))
    whole = 3 * (trained - experts / 2) + saved - biases / 2
    assert row["bytes_sent"] == pytest.approx(4 * 4 * whole, rel=0.02)
    words = ["--cpu", "--json", "--set=federation.experts.assignment=random"]
    words += ["--set=federation.experts.overlap=2.0", "--set=federation.client_optimizer=aggregate"]
    plan = json.loads(command("federate", "plan", "recipe.toml", *words)[1])
    assert plan["client_sent"] * 4 == pytest.approx(row["bytes_sent"], rel=0.02)


def test_experts_that_are_not_held_keep_their_global_values(federate, watched):
    run = federate("r", federation__experts__assignment="fixed", federation__experts__overlap=1.0,
                   federation__rounds=1, optimizer__lr=0.01)  # fmt: skip
    assert tensors(run, 2)
    (start, _, mine, _), (_, _, others, _) = watched[0], watched[1]
    assert not mine & others
    for name, tensor in start.items():
        expert = name.rpartition(".")[2]
        if ".experts." in name and int(expert) not in mine:
            # Two clients that do not hold it have the same: what the round began with.
            third = next(c for c in (1, 2, 3) if int(expert) not in watched[c][2])
            assert torch.equal(tensor, watched[third][0][name]), name


@pytest.mark.matrix
def test_a_run_with_random_experts_resumes(federate, command, tmp_path):
    (tmp_path / "recipe.toml").write_text(MOE)
    settings = {"federation__experts__assignment": "random", "federation__experts__overlap": 2.0,
                "federation__server__name": "fednesterov", "federation__rounds": 3,
                "federation__compression__name": "int8"}  # fmt: skip
    whole = federate("whole", **settings)
    run = whole.with_name("resumed")
    shutil.copytree(whole, run)
    for step in (4, 6):
        shutil.rmtree(run / "checkpoints" / f"step-{step:08d}")
    federate(run.name, **settings)
    assert_equal(tensors(run, 6), tensors(whole, 6))
    assert rows(run, "round") == rows(whole, "round")


def test_what_experts_cannot_do_is_refused(command, tmp_path):
    code, _, errors = command("federate", "run", "recipe.toml",
                              "--set=federation.experts.assignment=fixed")  # fmt: skip
    assert code == 2
    assert "the model has no experts" in errors
    (tmp_path / "recipe.toml").write_text(MOE)
    words = ["--set=federation.experts.assignment=fixed", "--set=federation.clients=16"]
    code, _, errors = command("federate", "run", "recipe.toml", *words)
    assert code == 2
    assert "a token takes" in errors
    code, _, errors = command("validate", "recipe.toml", words[0],
                              "--set=federation.merge.name=median")  # fmt: skip
    assert code == 2
    assert "is unsupported with [federation.experts]" in errors
