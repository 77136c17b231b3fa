"""Weights in bf16 are updated in fp32 and rounded without bias, the same under every plan."""

import itertools

import pytest
import torch

from tests.distributed import run_ranks
from tests.precision.test_training import debug_run, state
from tests.train.plans import BASE, assembled, recipe_with, train
from trainer.engine.checkpoint.box import Box
from trainer.engine.core.errors import CheckpointError
from trainer.engine.core.local import is_split, local
from trainer.engine.precision import rounding
from trainer.engine.precision.rounding import (
    divide_groups,
    make_rounded_step,
    random_bits,
    round_stochastically,
)
from trainer.engine.train.average import WeightAverage
from trainer.engine.train.tables import EMA

CPU = torch.device("cpu")
BF16 = torch.bfloat16
PRECISION = {"compute": "fp32", "parameters": "bf16"}


def draw(values, key):
    """Return fp32 values rounded stochastically, of a whole tensor."""
    weight = torch.empty_like(values, dtype=BF16)
    round_stochastically(weight, values, key, Box((0,) * values.ndim, tuple(values.shape)))
    return weight


def neighbours(values):
    """Return the values of bf16 at or below, and above, of positive numbers."""
    below = (values.view(torch.int32) & -0x10000).view(torch.float32)
    return below, (below.view(torch.int32) + 0x10000).view(torch.float32)


@pytest.mark.parametrize("over", ["elements", "steps"])
def test_the_mean_of_many_draws_is_the_value_in_fp32(over):
    values = torch.logspace(-30, 30, 61) * torch.linspace(1.0, 1.99, 61)
    if over == "elements":
        draws = draw(values.expand(4096, -1).contiguous(), "0:weight:0").float()
    else:
        draws = torch.stack([draw(values, f"0:weight:{n}") for n in range(2048)]).float()
    below, above = neighbours(values)
    assert ((draws == below) | (draws == above)).all()
    # Five standard errors of a draw between two neighbours, at most a half of their distance.
    error = 5 * (above - below) / 2 / len(draws) ** 0.5
    assert ((draws.double().mean(0) - values.double()).abs() < error).all()
    assert torch.equal(draw(-values, "0:weight:0"), -draw(values, "0:weight:0"))


def test_random_bits_are_uniform_and_know_nothing_of_each_other():
    salts = (123456789, -987654321, 5)
    bits = random_bits(salts, Box((0, 0), (512, 512)), CPU)
    counts = torch.bincount(bits.view(-1), minlength=2**16).view(256, 256)
    expected = bits.numel() / 256
    for axis in (0, 1):  # the upper and the lower byte
        chi_square = ((counts.sum(axis) - expected) ** 2 / expected).sum().item()
        assert 150 < chi_square < 380, "255 degrees of freedom"
    others = random_bits((*salts[:2], 6), Box((0, 0), (512, 512)), CPU)
    pairs = [(bits[1:], bits[:-1]), (bits[:, 1:], bits[:, :-1]), (bits, others), (bits, bits.T)]
    for a, b in pairs:
        a, b = a.double() - 32767.5, b.double() - 32767.5
        off = ~torch.eye(512, dtype=torch.bool)[: len(a), : a.shape[1]]
        a, b = a[off], b[off]
        assert abs((a * b).mean() / (a.std() * b.std())).item() < 5 / a.numel() ** 0.5


def test_a_part_gets_the_bits_of_its_place_in_the_whole(monkeypatch):
    values = torch.randn(13, 6, 5)
    expected = draw(values, "key")
    monkeypatch.setattr(rounding, "CHUNK", 60)
    assert torch.equal(draw(values, "key"), expected)
    for start, sizes in itertools.product([(0, 0, 0), (3, 2, 1)], [(7, 4, 4), (10, 1, 2)]):
        box = Box(start, sizes)
        part = torch.empty(sizes, dtype=BF16)
        round_stochastically(part, box.view(values).clone(), "key", box)
        assert torch.equal(part, box.view(expected))
    assert not torch.equal(draw(values, "other"), expected)


def test_what_bf16_has_stays_and_what_is_not_finite_is_seen():
    exact = torch.tensor([0.0, -0.0, 1.0, -3.5, 2**-133, 3.3895313892515355e38])
    assert torch.equal(draw(exact, "key").float().view(torch.int32), exact.view(torch.int32))
    # The NaN of NVIDIA's GPUs has all bits set: one more would be a negative zero.
    nan = torch.tensor([0x7FFFFFFF, -1, 0x7F800001], dtype=torch.int32).view(torch.float32)
    for n in range(20):
        assert draw(nan, f"{n}").isnan().all()
        assert draw(torch.tensor([float("inf"), float("-inf")]), f"{n}").isinf().all()
    assert draw(torch.tensor(0.1), "scalar").shape == ()


OPTIMIZERS = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=1e-2, fused=True),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, foreach=True),
    "plain sgd": lambda groups: torch.optim.SGD(groups, lr=0.1),
    "a plugin's": lambda groups: torch.optim.RMSprop(groups, lr=1e-2),
}


@pytest.mark.parametrize("name", list(OPTIMIZERS))
@pytest.mark.parametrize("seed", [None, 7])
def test_any_optimizer_updates_in_fp32_what_is_then_rounded(name, seed, monkeypatch):
    monkeypatch.setattr(rounding, "BUCKET", 50)
    weights = [torch.nn.Parameter(torch.randn(8, 5, dtype=BF16)) for _ in range(3)]
    frozen = torch.nn.Parameter(torch.randn(4, dtype=BF16))
    groups = list(divide_groups([{"params": [*weights[:2], frozen]}, {"params": weights[2:]}]))
    assert [len(group["params"]) for group in groups] == [1, 2, 1]
    optimizer = OPTIMIZERS[name](groups)
    named = {f"w{i}": weight for i, weight in enumerate([*weights, frozen])}
    step = make_rounded_step(optimizer, named.items(), seed)
    copies = [torch.nn.Parameter(weight.detach().float()) for weight in weights]
    theirs = OPTIMIZERS[name](copies)
    for number in range(3):
        for weight, copy in zip(weights, copies, strict=True):
            weight.grad = torch.randn(8, 5, dtype=BF16)
            copy.data, copy.grad = weight.detach().float(), weight.grad.float()
        theirs.step()
        step()
        for index, (weight, copy) in enumerate(zip(weights, copies, strict=True)):
            key, updated = f"7:w{index}:{number}", copy.detach()
            assert torch.equal(weight, updated.to(BF16) if seed is None else draw(updated, key))
            for kind, value in theirs.state[copy].items():
                if value is not None:
                    assert torch.equal(optimizer.state[weight][kind], value)


def test_an_average_stays_in_fp32_while_weights_in_bf16_hold_it():
    model = torch.nn.Linear(8, 8).to(BF16)
    average = WeightAverage(model, EMA(decay=0.9))
    expected = {name: weight.detach().float() for name, weight in model.named_parameters()}
    average.update(1)
    for step in range(2, 5):
        for name, weight in model.named_parameters():
            weight.data += 0.1
            expected[name].lerp_(weight.detach().float(), 0.1)
        average.update(step)
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    for _ in range(2):
        with average.swap_in():
            for name, weight in model.named_parameters():
                assert torch.equal(weight, expected[name].to(BF16))
        for name, weight in model.named_parameters():
            assert torch.equal(weight, before[name])
            assert torch.allclose(average.state()[f"ema.{name}"], expected[name], rtol=1e-6)


def losses(recipes):
    return [train(assembled(recipe), recipe.run.steps)[0] for recipe in recipes]


@pytest.mark.matrix
def test_small_updates_are_kept_where_rounding_to_the_nearest_loses_them():
    few = {"run": {"steps": 60, "seed": 3}, "optimizer": {"name": "adamw", "lr": 2e-5}}
    few["data"] = BASE["data"] | {"micro_batch": 8}
    kinds = [{"compute": "fp32"}, PRECISION, PRECISION | {"stochastic_rounding": False}]
    recipes = [recipe_with(**few, precision=precision) for precision in kinds]
    wide, random, nearest = run_ranks(1, losses, recipes, timeout=200)[0]
    gain = [sum(curve[:10]) - sum(curve[-10:]) for curve in (wide, random, nearest)]
    print(gain)
    assert abs(gain[1] - gain[0]) < 0.2 * abs(gain[2] - gain[0])


TIED = {"model": BASE["model"] | {"tie_embeddings": True}}
UNEVEN = {"model": BASE["model"] | {"vocab_size": 322, "ffn_dim": 68}}
EXPERTS = {
    "name": "qwen3",
    "flavor": "moe_debug",
    "dim": 32,
    "n_layers": 2,
    "moe": {"num_experts": 4, "expert_ffn_dim": 24},
}
PLANS = {
    "shard": ({"shard": 2}, {}),
    "copies": ({"replicate": 2, "shard": 1}, {}),
    "hybrid": ({"replicate": 2, "shard": 2, "fsdp": {"strategy": "hybrid_shard"}}, {}),
    "tensor and shard, uneven": ({"tensor": 2, "shard": 2}, UNEVEN),
    "pipeline, tied": ({"pipeline": 2, "shard": 1}, TIED),
    "pipeline, shard and ignored, tied": (
        {"pipeline": 2, "shard": 2, "fsdp": {"ignored": ["embed*", "*.up.weight"]}},
        TIED,
    ),
    "experts": ({"shard": 4, "expert": 2}, {"model": EXPERTS}),
    "columns": (
        {"shard": 2, "rules": [{"match": ".*up.weight", "place": {"shard": 1}}]},
        {},
    ),
}


def update_with_known_gradients(recipe):
    """Return the weights after two updates by gradients that are functions of the place alone."""
    from torch.distributed.tensor import distribute_tensor

    parts = assembled(recipe)
    for number in range(2):
        for name, weight in parts.model.named_parameters():
            index = torch.arange(weight.numel()).view(weight.shape) + len(name) * 100 + number
            gradient = (index * 0.7).sin().to(BF16)
            if is_split(weight):
                places = weight.device_mesh, weight.placements
                gradient = distribute_tensor(gradient, *places, src_data_rank=None)
            weight.grad = gradient
        parts.step.update(1.0)
    assert {weight.dtype for weight in parts.model.parameters()} == {BF16}
    return {
        name: (weight.full_tensor() if is_split(weight) else weight).detach().float().numpy()
        for name, weight in parts.model.named_parameters()
    }


@pytest.mark.matrix
@pytest.mark.parametrize("plan", list(PLANS))
def test_the_same_update_is_rounded_the_same_way_under_every_plan(plan):
    parallel, changes = PLANS[plan]
    changes = {**changes, "precision": PRECISION, "optimizer": {"name": "adamw", "lr": 1e-3}}
    (expected,) = run_ranks(1, update_with_known_gradients, recipe_with(**changes))
    world = 1
    for axis in ("replicate", "shard", "tensor", "pipeline"):
        world *= parallel.get(axis, 1)
    names = set()
    recipe = recipe_with(parallel=parallel, **changes)
    for found in run_ranks(world, update_with_known_gradients, recipe, timeout=200):
        names |= found.keys()
        for name, weight in found.items():
            assert (weight == expected[name]).all(), name
    assert names == expected.keys()


def curves_and_shards(recipe):
    parts = assembled(recipe)
    found = train(parts, 3)
    return found, [local(weight).float().numpy() for weight in parts.model.parameters()]


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("plan", "in_backward"),
    [("copies", False), ("hybrid", True), ("hybrid", False), ("tensor and shard, uneven", False)],
)
def test_runs_in_bf16_follow_one_process_and_replicas_stay_equal(plan, in_backward):
    parallel, changes = PLANS[plan]
    optimizer = {"name": "sgd", "lr": 0.3, "momentum": 0.9, "clip_norm": 0.5}
    if in_backward:
        optimizer["clip_norm"] = 0
        changes = {**changes, "memory": {"optimizer_in_backward": True}}
    rows = {"data": BASE["data"] | {"micro_batch": 8}}
    changes = {**changes, "precision": PRECISION, "optimizer": optimizer, **rows}
    (expected, _), *_ = run_ranks(1, curves_and_shards, recipe_with(**changes))
    world = 2 if plan == "copies" else 4
    ranks = run_ranks(world, curves_and_shards, recipe_with(parallel=parallel, **changes))
    for found, _ in ranks:
        # Gradients are rounded to bf16 before or after they are added up over ranks.
        assert found[0] == pytest.approx(expected[0], rel=1e-4)
        assert found[1] == pytest.approx(expected[1], rel=1e-3)
    if "tensor" not in plan:
        for first, second in zip(ranks[0][1], ranks[world // 2][1], strict=True):
            assert (first == second).all()


@pytest.mark.matrix
def test_a_run_in_bf16_resumes_bit_for_bit_and_begins_one_in_fp32(tmp_path):
    in_bf16 = {"precision.parameters": "bf16", "schedule.warmup_steps": 0, "ema.decay": 0.5}
    whole = debug_run(tmp_path / "whole", in_bf16, 6)
    debug_run(tmp_path / "parts", in_bf16, 3)
    assert debug_run(tmp_path / "parts", in_bf16, 6) == whole
    straight, resumed = (state(tmp_path / each) for each in ("whole", "parts"))
    assert straight.keys() == resumed.keys()
    for name, tensor in straight.items():
        assert torch.equal(tensor, resumed[name]), name
        section = name.partition(".")[0]
        assert section == "rng" or tensor.dtype is (BF16 if section == "model" else torch.float32)
    in_fp32 = {"schedule.warmup_steps": 0, "optimizer.lr": 0.0}
    with pytest.raises(CheckpointError, match=r"bfloat16 .* there and float32"):
        debug_run(tmp_path / "parts", in_bf16 | {"precision.parameters": "fp32"}, 8, ["precision"])
    begun = in_fp32 | {"run.init_from": str(tmp_path / "whole/llama3-debug")}
    debug_run(tmp_path / "wide", begun, 1)
    debug_run(tmp_path / "averaged", begun | in_bf16 | {"run.init.weights": "ema"}, 1)
    wide, averaged = (state(tmp_path / each) for each in ("wide", "averaged"))
    for name in filter(lambda name: name.startswith("model."), straight):
        assert torch.equal(wide[name], straight[name].float())
        mean = straight[name.replace("model.", "ema.", 1)]
        assert torch.equal(averaged[name], mean.to(BF16))
