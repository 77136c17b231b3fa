"""Schedules of states (DES-LOC), and layers that are frozen, personal or drawn again."""

import json
import shutil
from itertools import pairwise

import pytest
import torch

from tests.federated.conftest import RECIPE, assert_equal, rows, tensors
from trainer.engine.federated.layers.masks import Masks
from trainer.engine.federated.tables import Federation

NAMES = ["embed.weight", "layers.0.a.weight", "layers.1.a.weight"]
STATES = """
[[federation.states]]
state = "exp_avg"
interval = 2
[[federation.states]]
state = "exp_avg_sq"
interval = 4
"""


def make_masks(**keys):
    table = {"clients": 2, "rounds": 9, "local_steps": 1, **keys}
    return Masks(Federation.model_validate(table), NAMES)


def test_masks_are_those_of_their_entries_and_combine_by_or():
    masks = make_masks(
        states=[
            {"state": "parameters", "match": "layers.*", "interval": 3},
            {"state": "parameters", "match": "layers.1.*", "interval": 2, "offset": 1},
        ]
    )
    rounds = {name: [n for n in range(1, 10) if name in masks.merged_in(n)] for name in NAMES}
    assert rounds == {NAMES[0]: [*range(1, 10)], NAMES[1]: [3, 6, 9], NAMES[2]: [1, 3, 5, 6, 7, 9]}
    assert [masks.count_merges(name, 9) for name in NAMES] == [9, 3, 6]
    assert masks.merged_since(4, 5) == {NAMES[0], NAMES[2]}
    assert masks.kept == {NAMES[1], NAMES[2]}
    assert not masks.is_averaged("exp_avg", NAMES[0], 2)


def test_fragments_and_personal_layers_leave_the_mask_of_a_round():
    masks = make_masks(
        fragments={"count": 3}, layers=[{"match": "layers.1.*", "policy": "personal"}]
    )
    assert [set(masks.merged_in(n)) for n in (1, 2, 3, 4)] == [
        {NAMES[0]}, {NAMES[1]}, set(), {NAMES[0]}
    ]  # fmt: skip


def append(tmp_path, text):
    (tmp_path / "recipe.toml").write_text(RECIPE + text)


def test_states_are_averaged_at_their_own_frequencies(command, federate, tmp_path):
    """Follow both moments: a mean arrives in the round after it was taken, by hand."""
    append(tmp_path, STATES)
    run = federate("r", federation__client_optimizer="schedule", federation__rounds=4)
    sent = [row["bytes_sent"] for row in rows(run, "round")]
    received = [row["bytes_received"] for row in rows(run, "round")]
    # Weights each round, the first moment in rounds 2 and 4, the second in round 4.
    assert [each / sent[0] for each in sent] == [1, 2, 1, 3]
    assert [each / sent[0] for each in received] == [1, 1, 2, 1]
    words = ["--cpu", "--json", "--set=federation.client_optimizer=schedule"]
    plan = json.loads(command("federate", "plan", "recipe.toml", *words)[1])
    assert plan["client_sent"] * 4 == sum(sent) / 4
    for step, due in ((4, {"exp_avg"}), (8, {"exp_avg", "exp_avg_sq"})):
        found = tensors(run, step)
        for name in [each for each in found if each.startswith("client0_exp_avg")]:
            state, _, parameter = name.removeprefix("client0_").partition(".")
            key = f"optimizer.{parameter}.{state}"
            if state in due:
                own = [found[f"client{c}_{state}.{parameter}"].double() for c in range(4)]
                mean = torch.stack(own).mean(0)
                torch.testing.assert_close(found[key].double(), mean, rtol=0, atol=1e-7)
            else:
                assert key not in found


def test_a_schedule_of_every_round_is_the_average_of_the_states(federate, tmp_path):
    append(tmp_path, STATES.replace("interval = 2", "interval = 1").replace("= 4", "= 1"))
    often = federate("often", federation__client_optimizer="schedule")
    # Of AdamW, the number of steps of each client is that of the server: all train in each round.
    append(tmp_path, "")
    mean = federate("mean", federation__client_optimizer="aggregate")
    assert_equal(tensors(often, 8, "model."), tensors(mean, 8, "model."))


def test_a_run_with_schedules_and_personal_layers_resumes(federate, tmp_path):
    layers = '[[federation.layers]]\nmatch = "*.norm.weight"\npolicy = "personal"\n'
    params = '[[federation.states]]\nstate = "parameters"\nmatch = "layers.*"\ninterval = 2\n'
    append(tmp_path, STATES + params + layers)
    settings = {"federation__client_optimizer": "schedule", "federation__clients_per_round": 3}
    whole = federate("whole", **settings)
    run = whole.with_name("resumed")
    shutil.copytree(whole, run)
    for step in (6, 8):
        shutil.rmtree(run / "checkpoints" / f"step-{step:08d}")
    federate(run.name, **settings)
    assert_equal(tensors(run, 8), tensors(whole, 8))
    assert rows(run, "client") == rows(whole, "client")


def test_personal_layers_stay_on_their_client(federate, tmp_path):
    append(tmp_path, '[[federation.layers]]\nmatch = "*norm.weight"\npolicy = "personal"\n')
    run = federate("r", federation__rounds=2, optimizer__lr=0.01)
    first, last = tensors(run, 2, "model."), tensors(run, 4, "model.")
    personal = {name for name in last if name.endswith("norm.weight")}
    assert personal == {name for name in last if torch.equal(first[name], last[name])}
    for name in personal:
        own = [tensors(run, 4)[f"client{c}_weight.{name.removeprefix('model.')}"] for c in (0, 1)]
        assert not torch.equal(own[0], own[1])
    size = sum(last[name].numel() for name in last.keys() - personal)
    assert all(row["bytes_sent"] == 4 * 4 * size for row in rows(run, "round"))


def test_frozen_layers_are_not_trained_and_do_not_travel(federate, tmp_path, command):
    append(tmp_path, '[[federation.layers]]\nmatch = "tok_embed*"\npolicy = "freeze"\n')
    code, _, errors = command("federate", "run", "recipe.toml")
    assert code == 2
    assert "tok_embed* matches no weight" in errors
    append(tmp_path, '[[federation.layers]]\nmatch = "*embed*"\npolicy = "freeze"\n')
    run = federate("frozen", federation__rounds=2, optimizer__lr=0.01)
    first, last = tensors(run, 2, "model."), tensors(run, 4, "model.")
    frozen = {name for name in last if torch.equal(first[name], last[name])}
    assert frozen
    assert all("embed" in name for name in frozen)
    size = sum(last[name].numel() for name in last.keys() - frozen)
    assert all(row["bytes_sent"] == 4 * 4 * size for row in rows(run, "round"))


def test_random_layers_are_drawn_again_and_start_their_states_again(federate, tmp_path):
    text = '[[federation.layers]]\nmatch = "*embed*"\npolicy = "random"\ninterval = 2\n'
    append(tmp_path, text)
    settings = {"optimizer__lr": 1e-6, "federation__server__name": "fednesterov"}
    run = federate("r", **settings)
    starts = [tensors(run, step, "model.") for step in (2, 4, 6, 8)]
    for name in starts[0]:
        moved = [bool((b[name] - a[name]).abs().max() > 1e-3)
                 for a, b in pairwise(starts)]  # fmt: skip
        # Before round 3, and in no other round.
        assert moved == [False, "embed" in name, False], name
    found = tensors(run, 8)
    embed = next(name for name in found if name.startswith("client0_exp_avg.") and "embed" in name)
    assert found[embed.replace("exp_avg", "step")] == 4
    resumed = run.with_name("resumed")
    shutil.copytree(run, resumed)
    for step in (6, 8):
        shutil.rmtree(resumed / "checkpoints" / f"step-{step:08d}")
    federate(resumed.name, **settings)
    assert_equal(tensors(resumed, 8), found)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (STATES, 'set federation.client_optimizer = "schedule"'),
        ('[[federation.states]]\nstate = "exp_avg"\nintervall = 2\n', 'did you mean "interval"?'),
        ('[[federation.layers]]\nmatch = "*"\npolicy = "persona"\n', 'did you mean "personal"?'),
    ],
)
def test_faults_of_masks_are_told_with_their_key(command, tmp_path, text, message):
    append(tmp_path, text)
    code, _, errors = command("validate", "recipe.toml")
    assert code == 2
    assert message in errors
