"""Rounds against ordinary training, and runs that resume against undisturbed ones."""

import shutil

import pytest
import torch

from tests.federated.conftest import RECIPE, assert_equal, rows, tensors
from trainer.engine.checkpoint.manifest import read_manifest
from trainer.engine.federated.sampler import sample_clients
from trainer.engine.federated.tables import Federation


def test_one_client_with_one_step_is_ordinary_training_bit_for_bit(command, federate, tmp_path):
    assert command("run", "plain.toml", "--set=run.steps=6", "--set=run.name=plain")[0] == 0
    run = federate("one", federation__clients=1, federation__local_steps=1, federation__rounds=6)
    plain = tmp_path / "runs" / "plain"
    for step in (1, 6):
        assert_equal(tensors(run, step, "model."), tensors(plain, step, "model."))
    moments = {
        name.replace("client0_exp_avg.", "optimizer.") + ".exp_avg": tensor
        for name, tensor in tensors(run, 6, "client0_exp_avg.").items()
    }
    expected = tensors(plain, 6, "optimizer.")
    assert_equal(moments, {name: expected[name] for name in moments})


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_eight_clients_with_one_step_are_one_process_with_their_rows(
    command, federate, tmp_path, momentum
):
    sgd = {"optimizer__name": "sgd", "optimizer__lr": 0.1, "optimizer__clip_norm": 0.0}
    sgd["optimizer__momentum"] = momentum
    words = [f"--set={key.replace('__', '.')}={value}" for key, value in sgd.items()]
    words += ["--set=data.global_batch=32", "--set=run.steps=5", "--set=run.name=union"]
    assert command("run", "plain.toml", *words)[0] == 0
    run = federate(
        "eight", federation__clients=8, federation__local_steps=1, federation__rounds=5, **sgd
    )
    union = tensors(tmp_path / "runs" / "union", 5, "model.")
    assert_equal(tensors(run, 5, "model."), union, tolerance=1e-6)
    start = tensors(run, 1, "model.")
    assert max((union[name] - start[name]).abs().max() for name in union) > 1e-3


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.timeout(0)  # eight processes
def test_eight_clients_with_one_step_are_data_parallel_training_on_eight_ranks(
    command, federate, tmp_path
):
    sgd = {"optimizer__name": "sgd", "optimizer__lr": 0.1, "optimizer__clip_norm": 0.0}
    words = [f"--set={key.replace('__', '.')}={value}" for key, value in sgd.items()]
    words += ["--set=data.global_batch=32", "--set=run.steps=5", "--set=run.name=ranks"]
    words += ["--set=parallel.replicate=8", "--set=parallel.shard=1", "--nproc=8"]
    code, out, errors = command("run", "plain.toml", *words)
    assert code == 0, out + errors
    run = federate(
        "eight", federation__clients=8, federation__local_steps=1, federation__rounds=5, **sgd
    )
    ranks = tensors(tmp_path / "runs" / "ranks", 5, "model.")
    assert_equal(tensors(run, 5, "model."), ranks, tolerance=1e-6)


@pytest.mark.parametrize("policy", ["keep", "reset", "aggregate"])
def test_a_run_that_resumes_from_any_round_is_the_undisturbed_one(command, federate, policy):
    settings = {
        "federation__client_optimizer": policy,
        "federation__server__name": "fednesterov",
        "federation__clients_per_round": 3,
        "ema__decay": 0.9,
        "evaluate__interval": 3,
        "evaluate__steps": 1,
    }
    whole = federate("whole", **settings)
    for number in (1, 3):
        run = whole.with_name(f"from-{number}")
        shutil.copytree(whole, run)
        for folder in (run / "checkpoints").glob("step-*"):
            if int(folder.name[5:]) > 2 * number:
                shutil.rmtree(folder)
        federate(run.name, **settings)
        assert_equal(tensors(run, 8), tensors(whole, 8))
        for kind in ("client", "round", "eval"):
            assert rows(run, kind) == rows(whole, kind)
    assert [row["step"] for row in rows(whole, "eval")] == [0, 4, 6, 8]


def test_clients_keep_their_optimizer_states_apart(federate):
    run = federate("keep")
    first, second = (tensors(run, 8, f"client{number}_exp_avg.") for number in (0, 1))
    (name, moment), *_ = first.items()
    assert not torch.equal(moment, second[name.replace("client0", "client1")])
    assert tensors(federate("reset", federation__client_optimizer="reset"), 8, "client") == {}


def test_averaged_states_are_the_mean_and_count_the_servers_steps(federate):
    run = federate("keep", federation__rounds=1)
    shared = federate("mean", federation__rounds=1, federation__client_optimizer="aggregate")
    names = [each for each in tensors(shared, 2, "optimizer.") if each.endswith(".exp_avg")]
    assert names
    for each in names:
        name = each.removeprefix("optimizer.").removesuffix(".exp_avg")
        own = [tensors(run, 2)[f"client{number}_exp_avg.{name}"] for number in range(4)]
        mean = torch.stack(own).mean(0)
        torch.testing.assert_close(tensors(shared, 2)[each], mean, rtol=0, atol=1e-7)
        assert tensors(shared, 2)[f"optimizer.{name}.step"] == 2
    # Weights and both moments: three times the bytes to the server.
    (kept,), (averaged,) = rows(run, "round"), rows(shared, "round")
    assert averaged["bytes_sent"] == 3 * kept["bytes_sent"]


def test_a_client_that_is_not_drawn_keeps_its_place_in_its_data(federate):
    run = federate("some", federation__clients_per_round=2, federation__rounds=3)
    drawn = [row["client"] for row in rows(run, "client")]
    assert len(drawn) == 6
    manifest = read_manifest(run / "checkpoints" / "step-00000006")
    clients = manifest.extra["federation"]["clients"]
    assert [client["batch"] for client in clients] == [2 * drawn.count(str(n)) for n in range(4)]


def test_clients_are_drawn_evenly_without_replacement_and_by_the_seed_alone():
    table = Federation(clients=10, clients_per_round=4, rounds=1, local_steps=1)
    rounds = [sample_clients(table, 3, number) for number in range(1, 1001)]
    assert rounds == [sample_clients(table, 3, number) for number in range(1, 1001)]
    assert rounds != [sample_clients(table, 4, number) for number in range(1, 1001)]
    assert all(len(set(chosen)) == 4 and chosen == sorted(chosen) for chosen in rounds)
    counts = [sum(client in chosen for chosen in rounds) for client in range(10)]
    assert all(abs(count - 400) < 5 * (1000 * 0.4 * 0.6) ** 0.5 for count in counts)


@pytest.mark.parametrize(("dropout", "left"), [(0.0, 8), (0.25, 6), (0.99, 1)])
def test_dropout_leaves_out_a_share_of_those_drawn(dropout, left):
    table = Federation(clients=8, rounds=1, local_steps=1, dropout=dropout)
    assert {len(sample_clients(table, 0, number)) for number in range(1, 9)} == {left}


def test_clients_may_have_sources_of_their_own(command, federate, tmp_path):
    for name, text in (("one", "abcd"), ("two", "wxyz")):
        (tmp_path / f"{name}.txt").write_text(text * 4000)
    sources = "".join(
        f'[[data.sources]]\nname = "text"\npath = "{name}.txt"\nlabel = "{name}"\n'
        for name in ("one", "two")
    )
    text = RECIPE.replace('[[data.sources]]\nname = "synthetic"\n', sources)
    (tmp_path / "recipe.toml").write_text(text)
    by_partition = federate("p", federation__clients=2, federation__partition="sources",
                            optimizer__lr=0.01)  # fmt: skip
    tables = (
        "clients = 4\n",
        (
            '[[federation.client]]\nname = "a"\nsources = ["one"]\n'
            '[[federation.client]]\nname = "b"\nsources = ["two"]\n'
        ),
    )
    (tmp_path / "recipe.toml").write_text(text.replace(tables[0], "") + tables[1])
    by_tables = federate("t", optimizer__lr=0.01)
    assert_equal(tensors(by_tables, 8), tensors(by_partition, 8))
    assert [row["client"] for row in rows(by_tables, "client")][:2] == ["a", "b"]


def test_tokens_of_a_round_are_rounded_up_to_steps(command, tmp_path):
    (tmp_path / "recipe.toml").write_text(RECIPE.replace("local_steps = 2", "local_tokens = 129"))
    assert command("federate", "run", "recipe.toml", "--set=federation.rounds=1")[0] == 0
    assert [row["step"] for row in rows(tmp_path / "runs" / "r", "round")] == [2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("rounds=4.5", "federation.rounds"),
        ("clients_per_round=5", "clients_per_round (5) is more than the 4 clients"),
        ("local_tokens=100", "is given twice: local_steps or local_tokens"),
        ("partition=sources", "4 clients have 1 sources"),
        ("carrier=lokal", 'did you mean "local"?'),
        ("server.name=fedadm", 'did you mean "fedadam"?'),
        ("client_optimizer=schedule", "no entry of [[federation.states]] names a state"),
        ("weighing=tokens", 'did you mean "weighting"?'),
        (
            'compression={ name = "topk", error_feedback = false, error_decay = 0.9 }',
            "error_decay has no effect without error_feedback",
        ),
    ],
)
def test_faults_of_the_table_are_told_with_their_key(command, change, message):
    code, _, errors = command("validate", "recipe.toml", f"--set=federation.{change}")
    assert code == 2
    assert message in errors


@pytest.mark.parametrize(
    "change",
    ["run.steps=3", "resilience.non_finite=rollback", "precision.parameters=bf16",
     "profile.steps=2"],
)  # fmt: skip
def test_what_a_federation_cannot_use_is_refused(command, change):
    code, _, errors = command("validate", "recipe.toml", f"--set={change}")
    assert code == 2
    assert "[federation]" in errors


def test_run_names_the_command_of_a_federated_recipe_and_the_other_way_round(command):
    code, _, errors = command("run", "recipe.toml")
    assert code == 2
    assert "trainer federate run" in errors
    code, _, errors = command("federate", "run", "plain.toml", "--set=run.steps=1")
    assert code == 2
    assert "federation: the recipe has no such table" in errors
