"""Codecs against formulas in float64, error feedback, and what a run sends."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import trainer
from tests.cases import also
from tests.federated.conftest import assert_equal, rows, tensors
from trainer.engine.federated.compression.compressor import Compressor
from trainer.engine.federated.tables import compressions

SIZES = (1, 7, 4096, 4097, 10_000)


def build(name, **keys):
    return compressions[name].model_validate({"name": name, **keys}).build()


def draw(size, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).normal(size=size)).float()


def integers(values, largest, block):
    """Round each block to multiples of its largest magnitude over the largest integer."""
    found = []
    for first in range(0, len(values), block):
        part = values[first : first + block].double().numpy()
        scale = np.abs(part).max() / largest
        found.append(np.rint(part / scale) * scale)
    return np.concatenate(found)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("name", "largest", "block"), [("int8", 127, 256), ("int4", 7, 128), ("int4", 7, 32)]
)
def test_integers_are_multiples_of_a_blocks_scale(name, largest, block, size):
    codec, values = build(name, block=block), draw(size)
    data = codec.encode(values)
    found = codec.decode(data, size).double().numpy()
    scale = values.abs().max() / largest
    np.testing.assert_allclose(found, integers(values, largest, block), atol=float(scale) * 1e-5)
    assert data.numel() == codec.count_bytes(size)
    bits = {"int8": 8, "int4": 4}[name]
    assert data.numel() == -(-size * bits // 8) + 4 * -(-size // block)


@pytest.mark.parametrize("size", SIZES)
def test_bf16_is_the_nearest(size):
    codec, values = build("bf16"), draw(size)
    found = codec.decode(codec.encode(values), size)
    exact = values.double().numpy()
    # bf16 keeps 8 bits: half a step is 2^-9 of the power of two below the number.
    step = 2.0 ** (np.floor(np.log2(np.abs(exact))) - 8)
    assert (np.abs(found.double().numpy() - exact) <= step * 1.0000001).all()
    assert codec.encode(values).numel() == 2 * size == codec.count_bytes(size)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("keep", [1, 64, 4096])
def test_top_k_keeps_the_largest_of_each_block_in_two_bits(size, keep):
    codec, values = build("topk", keep=keep), draw(size)
    data = codec.encode(values)
    found = codec.decode(data, size)
    exact, kept = values.double().numpy(), np.zeros(size, dtype=bool)
    for first in range(0, size, 4096):
        part = np.abs(exact[first : first + 4096])
        count = -(-keep * len(part) // 4096)
        kept[first + np.argsort(-part, kind="stable")[:count]] = True
    assert ((found != 0).numpy() == kept).all()
    sizes = np.abs(exact[kept])
    is_large = sizes > sizes.mean()
    means = np.where(is_large, sizes[is_large].mean() if is_large.any() else 0,
                     sizes[~is_large].mean())  # fmt: skip
    np.testing.assert_allclose(found.numpy()[kept], np.sign(exact[kept]) * means, rtol=1e-5)
    assert data.numel() == codec.count_bytes(size)


def test_64_of_4096_values_at_14_bits_are_146_times_smaller_than_fp32():
    size = 4096 * 256
    assert size * 4 / build("topk").encode(draw(size)).numel() == pytest.approx(146.3, abs=0.1)


def test_both_directions_are_more_than_400_times_smaller_than_data_parallel_training():
    # Independent clients are the worst case: they choose different values.
    size, clients, local_steps = 4096 * 32, 8, 30
    codec = build("topk")
    sent = [codec.encode(draw(size, seed)) for seed in range(clients)]
    merged = torch.stack([codec.decode(data, size) for data in sent]).mean(0)
    received = codec.encode_merged(merged).numel()
    # DDP moves about twice the gradients in each step.
    data_parallel = 2 * 4 * size * local_steps
    assert data_parallel / (sent[0].numel() + received) > 500


@pytest.mark.parametrize("name", ["bf16", "int8", "int4", "topk"])
def test_the_server_steps_with_what_it_sends_back(name):
    codec = build(name, **({"keep": 8} if name == "topk" else {}))
    updates = [codec.decode(codec.encode(draw(9000, seed)), 9000) for seed in range(3)]
    merged = torch.stack(updates).mean(0)
    data = codec.encode_merged(merged)
    assert torch.equal(codec.decode_merged(data, 9000), merged.to(torch.bfloat16).float())
    assert data.numel() <= codec.count_merged_bytes(9000, 3)
    dense = 9000 * 2 if name != "topk" else 3 * (8 + 8 + 2) * 3.5 + 6 + 1
    assert data.numel() <= dense


@pytest.mark.parametrize("size", SIZES)
def test_a_block_of_many_merged_values_has_a_mask_in_place_of_places(size):
    codec, merged = build("topk", keep=512), torch.zeros(size)
    for first in range(0, size, 4096):  # each block has more values than the one before
        block = merged[first : first + 4096]
        block[draw(len(block), first).argsort()[: 341 + first // 4096]] = 1.0
    merged *= draw(size, 1)
    merged[size // 2] = float("nan")
    data = codec.encode_merged(merged)
    expected = merged.to(torch.bfloat16).float()
    torch.testing.assert_close(codec.decode_merged(data, size), expected, rtol=0, atol=0,
                               equal_nan=True)  # fmt: skip
    counts = [int((part != 0).sum()) for part in torch.split(expected, 4096)]
    places = sum(12 * count for count in counts if count <= 341)
    masks = 512 * sum(count > 341 for count in counts)
    assert data.numel() == 2 * len(counts) + -(-places // 8) + masks + 2 * sum(counts)
    assert data.numel() <= codec.count_merged_bytes(size, 8)


@pytest.mark.parametrize("name", ["bf16", "int8", "int4", "topk"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_number_that_is_not_finite_arrives_as_such(name, bad):
    values = draw(5000)
    values[4321] = bad
    codec = build(name)
    assert not codec.decode(codec.encode(values), 5000).isfinite().all()


@pytest.mark.parametrize("name", ["int4", "topk"])
def test_error_feedback_delays_what_is_lost(name):
    weights = {"w": torch.zeros(70, 90)}
    compressor = Compressor(build(name), weights, feedback=1.0)
    errors = compressor.begin_errors()
    given, arrived = np.zeros((70, 90)), np.zeros((70, 90))
    for seed in range(20):
        gradient = draw(6300, seed).view(70, 90)
        received, _ = compressor.send(errors, {"w": gradient})
        given += gradient.double().numpy()
        arrived += received["w"].double().numpy()
    np.testing.assert_allclose(arrived + errors["w"].double().numpy(), given, atol=1e-4)
    # Without it, what top-k leaves out would never arrive.
    plain = Compressor(build(name), weights, feedback=0.0)
    assert plain.begin_errors() == {}


@pytest.mark.parametrize("name", ["topk", *also("bf16", "int8", "int4")])
def test_a_decay_weighs_what_was_lost_by_its_age(name):
    """SparseLoCo, arXiv:2508.15706, algorithm 1: e becomes decay * e + gradient - sent."""
    decay, codec = 0.75, build(name)
    compressor = Compressor(codec, {"w": torch.zeros(5000)}, feedback=decay)
    errors = compressor.begin_errors()
    expected = np.zeros(5000)
    for seed in range(8):
        gradient = draw(5000, seed)
        received, _ = compressor.send(errors, {"w": gradient.clone()})
        total = decay * expected + gradient.double().numpy()
        sent = codec.decode(codec.encode(torch.from_numpy(total).float()), 5000)
        np.testing.assert_allclose(received["w"], sent, rtol=1e-5, atol=1e-6)
        expected = total - received["w"].double().numpy()
    np.testing.assert_allclose(errors["w"], expected, atol=1e-5)


def test_a_client_recovers_from_an_update_that_was_not_finite():
    compressor = Compressor(build("int8"), {"w": torch.zeros(8)}, feedback=1.0)
    errors = compressor.begin_errors()
    compressor.send(errors, {"w": torch.full((8,), float("nan"))})
    received, _ = compressor.send(errors, {"w": torch.ones(8)})
    assert torch.equal(received["w"], torch.ones(8))


@pytest.mark.parametrize("name", ["topk", *also("bf16", "int8", "int4")])
def test_a_compressed_run_resumes_and_sends_what_the_plan_says(command, federate, name):
    settings = {"federation__compression__name": name, "federation__server__name": "fednesterov"}
    whole = federate("whole", **settings)
    run = whole.with_name("resumed")
    shutil.copytree(whole, run)
    for step in (6, 8):
        shutil.rmtree(run / "checkpoints" / f"step-{step:08d}")
    federate(run.name, **settings)
    assert_equal(tensors(run, 8), tensors(whole, 8))
    assert rows(run, "round") == rows(whole, "round")
    words = [f"--set={key.replace('__', '.')}={value}" for key, value in settings.items()]
    plan = json.loads(command("federate", "plan", "recipe.toml", "--cpu", "--json", *words)[1])
    first, *others = rows(whole, "round")
    weights = plan["weights"] * 4
    assert {row["bytes_sent"] for row in (first, *others)} == {4 * plan["client_sent"]}
    # At first each client receives the weights, then what was merged: it steps by itself.
    assert first["bytes_received"] == 4 * weights
    for row in others:
        assert 0 < row["bytes_received"] <= 4 * plan["client_received"]
    loss = rows(federate("plain", federation__server__name="fednesterov"), "round")[-1]["loss"]
    assert rows(whole, "round")[-1]["loss"] == pytest.approx(loss, rel=0.01)


def test_sparse_diloco_plans_400_times_less_traffic_than_data_parallel(command):
    recipe = Path(trainer.__file__).parent / "recipes/sparse_diloco.toml"
    code, out, errors = command("federate", "plan", recipe, "--cpu", "--json")
    assert code == 0, errors
    plan = json.loads(out)
    assert plan["local_steps"] == 30
    assert plan["data_parallel"] > 400 * (plan["client_sent"] + plan["client_received"])


def test_a_client_that_missed_a_round_receives_weights_and_outer_states(federate):
    run = federate("r", federation__compression__name="int8", federation__clients_per_round=2,
                   federation__server__name="fedadam", federation__rounds=6)  # fmt: skip
    weights = 4 * sum(each.numel() for each in tensors(run, 12, "model.").values())
    last = dict[str, int]()
    for row in rows(run, "client"):
        number, name, received = row["round"], row["client"], row["bytes_received"]
        if number == 1:
            assert received == weights
        elif last.get(name) == number - 1:
            assert received == weights // 2
        else:
            assert received == 3 * weights
        last[name] = number
