"""`torch.NAME`: the optimizers and schedules of torch, checked by a table and equal to torch's."""

import inspect
import subprocess
import sys
import warnings

import pytest
import torch
from torch import nn, optim
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import lr_scheduler

from tests.distributed import run_ranks
from tests.optim.torch_table import PATH, installed_sources, render, table
from tests.train.plans import BASE, assembled, recipe_with, train
from trainer.engine.checkpoint import state as train_state
from trainer.engine.core.errors import RecipeError
from trainer.engine.optim.library.table import OPTIMIZERS, SCHEDULES
from trainer.engine.optim.parameters import ELEMENTWISE, parameter_groups, undecorated_step
from trainer.engine.optim.tables import optimizers, schedules
from trainer.engine.recipe.load import load_recipe
from trainer.engine.train.evaluate import validate

KEYS = {
    "ASGD": {"lambd": 0.01, "t0": 2.0, "weight_decay": 0.1},
    "Adam": {"amsgrad": True},
    "NAdam": {"decoupled_weight_decay": True, "weight_decay": 0.1},
    "RMSprop": {"momentum": 0.9, "centered": True},
    "Rprop": {"etas": [0.4, 1.3]},
    "SGD": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
}
DATA = BASE["data"] | {"micro_batch": 4}
EXACT = [name for name in OPTIMIZERS if getattr(optim, name) in ELEMENTWISE]


def config_of(name):
    return optimizers[f"torch.{name}"].model_validate(
        {"name": f"torch.{name}", **KEYS.get(name, {})}
    )


def test_the_table_is_up_to_date():
    assert PATH.read_text("utf-8") == render(table(installed_sources()))


def test_every_class_of_torch_is_offered_or_has_a_reason():
    kinds = [
        (optim, optim.Optimizer, optimizers),
        (lr_scheduler, lr_scheduler.LRScheduler, schedules),
    ]
    for module, base, registry in kinds:
        names = {
            f"torch.{name}"
            for name, value in vars(module).items()
            if inspect.isclass(value) and issubclass(value, base) and value is not base
        } - {"torch._LRScheduler"}
        assert len(names) > 10
        assert {
            n for n in registry if n.startswith("torch.")
        } | registry.unsupported.keys() == names
        assert not registry.unsupported.keys() & set(registry)


def gradients_for(weights, number):
    return [
        torch.sin(torch.arange(weight.numel()).view(weight.shape) * (number + 1.0))
        for weight in weights
    ]


def take_steps(step, weights, numbers):
    for number in numbers:
        for weight, full in zip(weights, gradients_for(weights, number), strict=True):
            weight.grad = full.to(weight.dtype)
            if isinstance(weight, DTensor):
                weight.grad = distribute_tensor(full, weight.device_mesh, weight.placements)
        step()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_are_those_of_torch(name):
    torch.manual_seed(0)
    start = [torch.randn(3, 4, dtype=torch.float64), torch.randn(5, dtype=torch.float64)]
    config = config_of(name)
    ours = [nn.Parameter(value.clone()) for value in start]
    groups = parameter_groups(zip("ab", ours, strict=True), config)
    take_steps(undecorated_step(config.build(groups, torch.device("cpu"))), ours, range(4))
    theirs = [nn.Parameter(value.clone()) for value in start]
    keys = {**KEYS.get(name, {})}
    take_steps(getattr(optim, name)(theirs, foreach=False, **keys).step, theirs, range(4))
    for found, expected, first in zip(ours, theirs, start, strict=True):
        # ASGD keeps its rate in fp32.
        tolerance = 1e-7 if name == "ASGD" else 1e-12
        assert found.detach().numpy() == pytest.approx(expected.detach().numpy(), rel=tolerance)
        assert not torch.equal(found, first)


def losses():
    """Return validation losses around ten steps with the default rate of each optimizer."""
    found = {}
    for name in OPTIMIZERS:
        model = {"flavor": "debug", "max_seq_len": 32}
        # The default of RMSprop is too high for this model.
        rate = {"lr": 1e-3} if name == "RMSprop" else {}
        optimizer = {"name": f"torch.{name}", **rate}
        recipe = recipe_with(model=model, data=DATA, optimizer=optimizer)
        parts = assembled(recipe)
        before = validate(parts)["loss"]
        train(parts, 10)
        found[name] = before, validate(parts)["loss"]
    return found


def test_the_default_rates_lower_the_loss_in_ten_steps():
    for name, (before, after) in run_ranks(1, losses)[0].items():
        assert after < before, name


def sharded_weights(names, size):
    """Return the weights after three steps of each optimizer, whole."""
    found = {}
    for name in names:
        torch.manual_seed(0)
        model = nn.Linear(4, 3)  # three rows over two ranks: shards of unequal sizes
        if size > 1:
            fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
        config, weights = config_of(name), list(model.parameters())
        groups = parameter_groups(model.named_parameters(), config)
        take_steps(undecorated_step(config.build(groups, torch.device("cpu"))), weights, range(3))
        whole = (w.full_tensor() if isinstance(w, DTensor) else w for w in weights)
        found[name] = [weight.tolist() for weight in whole]
    return found


def test_shards_have_the_bits_of_whole_weights():
    (alone,), ranks = (
        run_ranks(1, sharded_weights, EXACT, 1),
        run_ranks(2, sharded_weights, EXACT, 2),
    )
    assert len(alone) > 10
    assert ranks == [alone, alone]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_saved_state_continues_to_the_bit(name):
    torch.manual_seed(0)
    model, config = nn.Linear(4, 3), config_of(name)

    def build(numbered):
        return config.build(
            parameter_groups(numbered.named_parameters(), config), torch.device("cpu")
        )

    optimizer = build(model)
    take_steps(undecorated_step(optimizer), list(model.parameters()), range(3))
    resumed = nn.Linear(4, 3)
    resumed.load_state_dict(model.state_dict())
    fresh = build(resumed)
    saved = train_state.optimizer_state(model, optimizer)
    described = {key: {"shape": [*v.shape], "dtype": str(v.dtype)} for key, v in saved.items()}
    numbers = train_state.optimizer_numbers(model, optimizer)
    train_state.prepare_optimizer(resumed, fresh, described, numbers)
    for key, value in train_state.optimizer_state(resumed, fresh).items():
        value.copy_(saved[key])
    for trained, stepped in ((model, optimizer), (resumed, fresh)):
        take_steps(undecorated_step(stepped), list(trained.parameters()), range(3, 6))
    for found, expected in zip(resumed.parameters(), model.parameters(), strict=True):
        assert torch.equal(found, expected)


TOTAL, PEAK = 30, 0.3
SCHEDULE_KEYS = {
    "ConstantLR": {},
    "CosineAnnealingLR": {"eta_min": 0.01},
    "CosineAnnealingWarmRestarts": {"T_0": 4, "T_mult": 2},
    "CyclicLR": {"base_lr": 0.05, "max_lr": 0.2, "step_size_up": 5},
    "ExponentialLR": {"gamma": 0.9},
    "LinearLR": {},
    "MultiStepLR": {"milestones": [3, 8]},
    "OneCycleLR": {"three_phase": True},
    "PolynomialLR": {"total_iters": 12, "power": 2.0},
    "StepLR": {"step_size": 7},
}
GIVEN = {
    "CosineAnnealingLR": {"T_max": TOTAL},
    "OneCycleLR": {"total_steps": TOTAL, "max_lr": PEAK},
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_rates_and_momentum_are_those_of_torch(name):
    keys = SCHEDULE_KEYS[name]
    schedule = schedules[f"torch.{name}"].model_validate({"name": f"torch.{name}", **keys})
    schedule = schedule.settle(10.0, PEAK)
    optimizer = optim.SGD([torch.zeros(1, requires_grad=True)], lr=PEAK, momentum=0.7)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scheduler = getattr(lr_scheduler, name)(optimizer, **keys, **GIVEN.get(name, {}))
    expected = []
    for _ in range(TOTAL):
        group = optimizer.param_groups[0]
        expected.append((group["lr"], group["momentum"]))
        optimizer.step()
        scheduler.step()
    found = [
        (PEAK * schedule.lr_factor(step, TOTAL), schedule.momentum(step, TOTAL, 0.7))
        for step in range(TOTAL)
    ]
    for pair, wanted in zip(found, expected, strict=True):
        assert pair == pytest.approx(wanted, rel=1e-6, abs=1e-12)
    assert schedule.changes_momentum == (name in ("CyclicLR", "OneCycleLR"))
    assert schedule.depends_on_total == (name in GIVEN)
    assert schedule.lr_factor(7, TOTAL) == found[7][0] / PEAK, "steps may be asked for in any order"


def test_a_warmup_comes_before_the_schedule():
    keys = {"name": "torch.StepLR", "step_size": 2, "warmup_steps": 3}
    schedule = schedules["torch.StepLR"].model_validate(keys).settle(10.0, PEAK)
    found = [schedule.lr_factor(step, 10) for step in range(7)]
    assert found == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0, 0.1, 0.1])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[optimizer]\nname = 'torch.LBFGS'", "evaluates the loss several times in a step"),
        ("[optimizer]\nname = 'torch.SparseAdam'", "updates sparse gradients alone"),
        ("[optimizer]\nname = 'torch.RAdamm'", 'did you mean "torch.RAdam"'),
        ("[optimizer]\nname = 'torch.RAdam'\nbeta = 1.0", 'did you mean "betas"'),
        ("[optimizer]\nname = 'torch.RAdam'\nbetas = [0.9, 1.0]", "optimizer.betas"),
        ("[optimizer]\nname = 'torch.Rprop'\nweight_decay = 0.1", "optimizer.weight_decay"),
        ("[schedule]\nname = 'torch.LambdaLR'", "takes a function"),
        ("[schedule]\nname = 'torch.MultiplicativeLR'", "takes a function"),
        ("[schedule]\nname = 'torch.ReduceLROnPlateau'", 'is "plateau" here'),
        ("[schedule]\nname = 'torch.StepLR'", "schedule.step_size"),
        (
            "[schedule]\nname = 'torch.OneCycleLR'\nanneal_strategy = 'line'",
            'did you mean "linear"',
        ),
        (
            "[schedule]\nname = 'torch.OneCycleLR'\n[optimizer]\nname = 'torch.Adagrad'",
            "set schedule.cycle_momentum = false",
        ),
    ],
)
def test_a_recipe_is_checked_by_the_table(text, message, tmp_path):
    path = tmp_path / "r.toml"
    path.write_text(f"[run]\nsteps = 1\n{text}\n")
    with pytest.raises(RecipeError) as error:
        load_recipe(path, [])
    assert message in error.value.render()


def test_validation_does_not_import_torch(tmp_path):
    path = tmp_path / "r.toml"
    names = "[optimizer]\nname = 'torch.NAdam'\n[schedule]\nname = 'torch.OneCycleLR'"
    path.write_text(f"[run]\nsteps = 1\n{names}\n")
    code = "import sys; from trainer.engine.recipe.load import load_recipe; "
    code += "load_recipe(sys.argv[1], []); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code, str(path)], check=True, timeout=60)


def test_a_value_that_torch_refuses_names_the_table():
    config = optimizers["torch.SGD"].model_validate({"name": "torch.SGD", "nesterov": True})
    groups = parameter_groups([("a", nn.Parameter(torch.ones(2)))], config)
    with pytest.raises(RecipeError, match="Nesterov momentum requires a momentum"):
        config.build(groups, torch.device("cpu"))
    keys = {"name": "torch.CyclicLR", "base_lr": 0.1, "step_size_up": 1, "step_size_down": 1}
    schedules["torch.CyclicLR"].model_validate(keys).settle(1.0, 0.3)
