"""Fragments of the weights that are merged in turn (Streaming DiLoCo)."""

import json
import shutil

import pytest
import torch

from tests.cases import also
from tests.federated.conftest import assert_equal, rows, tensors
from trainer.engine.core.errors import RecipeError
from trainer.engine.federated.carriers import local_carrier
from trainer.engine.federated.layers.fragments import divide_weights
from trainer.engine.federated.layers.tables import Fragments

NAMES = ["embed.weight", *(f"layers.{n}.{w}.weight" for n in range(5) for w in "ab"), "norm.weight"]


def blocks(fragments):
    return [sorted({name.split(".weight")[0].removesuffix(".a").removesuffix(".b")
                    for name in fragment}) for fragment in fragments]  # fmt: skip


def test_blocks_are_divided_in_strides_or_in_a_row():
    strided = divide_weights(NAMES, Fragments(count=3))
    assert blocks(strided) == [
        ["embed", "layers.2", "norm"], ["layers.0", "layers.3"], ["layers.1", "layers.4"]
    ]  # fmt: skip
    sequential = blocks(divide_weights(NAMES, Fragments(count=3, pattern="sequential")))
    assert sequential == [
        ["embed", "layers.0", "layers.1"], ["layers.2", "layers.3"], ["layers.4", "norm"]
    ]  # fmt: skip
    assert set().union(*strided) == set(NAMES)
    with pytest.raises(RecipeError, match="8 fragments of a model that has 7 blocks"):
        divide_weights(NAMES, Fragments(count=8))


def test_a_round_merges_one_fragment_alone(federate, command):
    run = federate("r", federation__fragments__count=3)
    names = [name.removeprefix("model.") for name in tensors(run, 2, "model.")]
    fragments = divide_weights(names, Fragments(count=3))
    for number in range(2, 5):
        before = tensors(run, 2 * number - 2, "model.")
        after = tensors(run, 2 * number, "model.")
        changed = {name for name in names if not torch.equal(before[f"model.{name}"],
                                                             after[f"model.{name}"])}  # fmt: skip
        fragment = fragments[(number - 1) % 3]
        assert changed == fragment
        size = 4 * sum(after[f"model.{name}"].numel() for name in fragment)
        row = rows(run, "round")[number - 1]
        assert row["bytes_sent"] == 4 * size
    words = ["--cpu", "--json", "--set=federation.fragments.count=3"]
    plan = json.loads(command("federate", "plan", "recipe.toml", *words)[1])
    sent = [row["bytes_sent"] / 4 for row in rows(run, "round")]
    assert plan["largest_sent"] == max(sent)
    assert plan["client_sent"] == -(-sum(sent[:3]) // 3)
    # The clients receive what the round before has merged.
    assert [row["bytes_received"] for row in rows(run, "round")[1:]] == [
        row["bytes_sent"] for row in rows(run, "round")[:-1]
    ]


def test_a_client_continues_with_its_own_weights_and_mixes_what_arrives(federate, monkeypatch):
    """Follow the weights of client 1 through round 2 by hand, in float64."""
    seen = {}
    honest = local_carrier.train_locally

    def train(parts, client, position, before_step):
        def watch(done):
            before = copy(parts)
            before_step(done)
            if client.number == 1 and position.step == 2:
                seen[done] = before, copy(parts)

        result = honest(parts, client, position, watch)
        if client.number == 1 and position.step == 0:
            seen["end"] = copy(parts)
        return result

    def copy(parts):
        return {name: each.detach().clone() for name, each in parts.model.named_parameters()}

    monkeypatch.setattr(local_carrier, "train_locally", train)
    run = federate("r", federation__fragments__count=2, federation__fragments__delay=1,
                   federation__fragments__mixing=0.25, federation__rounds=2)  # fmt: skip
    merged = tensors(run, 2, "model.")
    first, _ = divide_weights(seen["end"], Fragments(count=2))
    # Nothing arrives before the delay: the client starts with what it ended with.
    assert_equal(seen[0][1], seen["end"])
    before, after = seen[1]
    for name, weight in before.items():
        expected = weight.double()
        if name in first:
            expected = 0.25 * expected + 0.75 * merged[f"model.{name}"].double()
            assert not torch.equal(weight, after[name])
        torch.testing.assert_close(after[name].double(), expected, rtol=0, atol=1e-7)


@pytest.mark.parametrize("compression", [*also("none"), "int8"])
def test_a_run_with_fragments_resumes(federate, compression):
    settings = {
        "federation__fragments__count": 2,
        "federation__fragments__delay": 1,
        "federation__fragments__mixing": 0.5,
        "federation__server__name": "fednesterov",
        "federation__compression__name": compression,
    }
    whole = federate("whole", **settings)
    run = whole.with_name("resumed")
    shutil.copytree(whole, run)
    for step in (6, 8):
        shutil.rmtree(run / "checkpoints" / f"step-{step:08d}")
    federate(run.name, **settings)
    assert_equal(tensors(run, 8), tensors(whole, 8))
    assert rows(run, "round") == rows(whole, "round")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("fragments.delay=2", "delay (2) is not less than the 2 steps of a round"),
        ("clients_per_round=2", "all clients must train in each round"),
        ("client_optimizer=aggregate", "is unsupported with client_optimizer"),
    ],
)
def test_what_fragments_cannot_do_is_refused(command, change, message):
    words = ["--set=federation.fragments.count=2", f"--set=federation.{change}"]
    code, _, errors = command("validate", "recipe.toml", *words)
    assert code == 2
    assert message in errors
