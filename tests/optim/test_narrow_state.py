"""Optimizer state in bf16 and in 8 bits: against torchao, under plans, counted and refused."""

import json
import re

import pytest
import torch
from torch import nn

from tests.cases import also
from tests.commands import run_in_process, run_trainer
from tests.distributed import run_ranks
from tests.train.plans import assembled, recipe_with, train
from tests.train.processes import newest
from trainer.engine.core.errors import RecipeError
from trainer.engine.optim.elementwise.narrow import (
    block_size,
    dynamic_values,
    new_moment,
    read_moment,
    write_moment,
)
from trainer.engine.optim.elementwise.tables import ADOPT, AdEMAMix, DecoupledSGDW, Lion, QHAdam
from trainer.engine.optim.optimizers import AdamW
from trainer.engine.optim.parameters import parameter_groups, undecorated_step
from trainer.engine.recipe.load import load_recipe

CPU = torch.device("cpu")
SHAPE = (24, 512)


def stepper(config, weight):
    optimizer = config.build(parameter_groups([("weight", weight)], config), CPU)
    return optimizer, undecorated_step(optimizer)


def gradients(count, shape=SHAPE):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator) for _ in range(count)]


def bytes_of(optimizer):
    states = (value for state in optimizer.state.values() for value in state.values())
    return sum(value.nbytes for value in states if isinstance(value, torch.Tensor))


@pytest.mark.parametrize("is_signed", [True, False])
def test_the_values_of_a_code_are_those_of_torchao(is_signed):
    from torchao.optim.quant_utils import create_dynamic_map  # ranks that import this module wait

    expected = torch.tensor(create_dynamic_map(is_signed))
    torch.testing.assert_close(dynamic_values(is_signed, CPU), expected, rtol=1e-6, atol=0)


def test_updates_in_8_bits_are_those_of_torchao():
    from torchao.optim.adam import single_param_adam
    from torchao.optim.subclass_8bit import OptimState8bit

    config = AdamW(lr=1e-2, betas=(0.9, 0.99), state_dtype="int8")
    weight = nn.Parameter(gradients(1)[0] / 10)
    theirs = weight.detach().clone()
    optimizer, step = stepper(config, weight)
    means = [OptimState8bit.zeros(SHAPE, signed, 256, CPU, torch.float32) for signed in (1, 0)]
    for number, gradient in enumerate(gradients(8), 1):
        weight.grad = gradient
        step()
        single_param_adam(
            theirs, gradient, torch.tensor(float(number)), *means, None, torch.tensor(config.lr),
            *config.betas, config.weight_decay, config.eps, True, False,
        )  # fmt: skip
    # The tables of values differ by a rounding, which may give an element the other neighbour.
    differing = ~torch.isclose(weight.detach(), theirs, rtol=1e-5, atol=1e-6)
    assert differing.float().mean() < 1e-3
    state = optimizer.state[weight]
    for key, mean in zip(("exp_avg", "exp_avg_sq"), means, strict=True):
        differing = state[key] != mean.codes  # rounding may choose the other neighbour
        assert differing.float().mean() < 1e-3
        torch.testing.assert_close(state[f"{key}_scale"].flatten(), mean.scale, rtol=1e-5, atol=0)
    assert (theirs - gradients(1)[0] / 10).abs().max() > 0.05, "the steps moved the weight"


@pytest.mark.parametrize(
    "config", [ADOPT(), QHAdam(), Lion(), AdEMAMix(), DecoupledSGDW(momentum=0.9), AdamW()],
    ids=lambda config: config.name,
)  # fmt: skip
def test_narrow_states_take_their_share_of_the_memory_and_follow_the_wide_ones(config):
    config = config.model_copy(update={"lr": 1e-2, "weight_decay": 0.0})
    moved, held = {}, {}
    for dtype in ("fp32", "bf16", "int8"):
        weight = nn.Parameter(torch.zeros(SHAPE))
        found = config.model_copy(update={"state_dtype": dtype, "cautious_decay": True})
        optimizer, step = stepper(found, weight)
        for gradient in gradients(6):
            weight.grad = gradient + 0.3
            step()
        moved[dtype], held[dtype] = weight.detach(), bytes_of(optimizer)
    assert held["bf16"] == held["fp32"] / 2
    assert held["int8"] == held["fp32"] * (1 + 4 / 256) / 4
    for dtype, most in {"bf16": 0.05, "int8": 0.2}.items():
        apart = (moved[dtype] - moved["fp32"]).norm() / moved["fp32"].norm()
        assert 0 < apart < most, (dtype, apart)


def test_a_moment_that_is_read_is_within_a_step_of_the_moment_that_was_written():
    values = gradients(1)[0] * torch.logspace(-3, 2, SHAPE[0]).unsqueeze(1)
    state = new_moment(values, "exp_avg", "int8")
    write_moment(state, "exp_avg", values)
    found = read_moment(state, "exp_avg", torch.float32)
    blocks, scales = values.view(24, 2, 256), state["exp_avg_scale"]
    assert torch.equal(scales, blocks.abs().amax(-1)), "each block of a row has its own scale"
    gaps = dynamic_values(True, CPU).diff().max() * scales.unsqueeze(-1)
    assert ((found.view_as(blocks) - blocks).abs() <= gaps * 1.001).all()


def test_a_dtype_that_a_weight_cannot_have_is_that_of_the_weight():
    assert [block_size(*each) for each in [(512, 2), (192, 2), (96, 2), (512, 1)]] == [
        256,
        64,
        0,
        0,
    ]
    state = new_moment(torch.zeros(7, 96), "exp_avg", "int8")
    assert {key: value.dtype for key, value in state.items()} == {"exp_avg": torch.float32}


def test_a_slow_mean_in_bf16_is_warned_about():
    assert "0.999" in next(AdamW(betas=(0.9, 0.999), state_dtype="bf16").warnings())
    assert "0.9999" in next(ADOPT(state_dtype="bf16").warnings())
    assert not list(AdamW(state_dtype="bf16").warnings())
    assert not list(ADOPT(state_dtype="int8").warnings())


RECIPE = """
[run]
name = "few"
steps = 4
[model]
dim = 128
n_layers = 1
n_heads = 4
n_kv_heads = 2
ffn_dim = 256
[data]
seq_len = 32
global_batch = 4
[[data.sources]]
name = "synthetic"
[precision]
compute = "fp32"
[schedule]
name = "constant"
[evaluate]
interval = 0
[optimizer]
name = "{name}"
state_dtype = "{dtype}"
"""


def write(folder, name="adamw", dtype="int8"):
    folder.mkdir(exist_ok=True)
    (folder / "recipe.toml").write_text(RECIPE.format(name=name, dtype=dtype))
    return folder / "recipe.toml"


def test_the_estimate_counts_the_bits(tmp_path, capsys):
    held = {}
    for dtype in ("fp32", "bf16", "int8"):
        recipe = write(tmp_path, dtype=dtype)
        _, text, _ = run_in_process(capsys, "estimate-memory", recipe, "--json")
        held[dtype] = json.loads(text)["ranks"][0]["at_peak"]["optimizer"]
    assert held["bf16"] == pytest.approx(held["fp32"] / 2, rel=0.01)
    assert held["int8"] == pytest.approx(held["fp32"] * (1 + 4 / 128) / 4, rel=0.05)


@pytest.mark.parametrize("name", ["muon", "mars", "schedule_free", "adafactor"])
def test_an_optimizer_without_the_key_is_refused(name, tmp_path):
    with pytest.raises(RecipeError, match=r"optimizer.state_dtype: unknown key"):
        load_recipe(write(tmp_path, name))


def narrow_recipe(dim, plan):
    return recipe_with(
        model={"dim": dim, "n_layers": 1, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": dim},
        optimizer={"name": "adamw", "state_dtype": "int8"},
        parallel=plan,
    )


def test_a_plan_that_divides_blocks_is_refused_by_the_name_of_the_parameter(tmp_path, capsys):
    recipe = write(tmp_path)
    words = ["--world", "2", "--set", "parallel.tensor=2", "--set", "model.dim=64"]
    code, _, errors = run_in_process(capsys, "plan", recipe, *words)
    assert code == 2, errors
    assert re.search(r"optimizer.state_dtype: .*layers.0.attention.o.weight", errors)


def states_under(recipe):
    parts = assembled(recipe)
    train(parts)
    return {
        f"{name}.{key}": value.full_tensor() if hasattr(value, "full_tensor") else value
        for name, weight in parts.model.named_parameters()
        for key, value in parts.optimizer.state[weight].items()
        if isinstance(value, torch.Tensor)
    }


@pytest.mark.parametrize(("dim", "plan"), [(256, {"shard": 2}), *also((512, {"tensor": 2}))])
def test_a_block_is_as_long_under_every_plan(dim, plan):
    (alone,) = run_ranks(1, states_under, narrow_recipe(dim, {}))
    for found in run_ranks(2, states_under, narrow_recipe(dim, plan)):
        assert found.keys() == alone.keys()
        for name, value in alone.items():
            assert found[name].shape == value.shape, name
            if name.endswith("_scale"):
                torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-9)


@pytest.mark.parametrize(
    ("name", "dtype"), also(("adamw", "int8"), ("adamw", "bf16"), ("ademamix", "int8"))
)
def test_a_resumed_run_makes_the_weights_of_no_interruption(name, dtype, tmp_path):
    weights = []
    for folder, stops in {"through": [4], "resumed": [2, 4]}.items():
        recipe = write(tmp_path / folder, name, dtype)
        for stop in stops:
            words = ["run", recipe, "--set", f"run.steps={stop}", "--set", "parallel.shard=2"]
            done = run_trainer(*words, folder=tmp_path / folder, ranks=2)
            assert done.returncode == 0, done.stderr
        weights.append(newest(tmp_path / folder / "runs/few")[1])
    through, resumed = weights
    assert through.keys() == resumed.keys()
    assert any(value.dtype in (torch.uint8, torch.bfloat16) for value in through.values())
    for key, value in through.items():
        assert torch.equal(value, resumed[key]), key
