"""Apple's GPUs: which processes take one, and what is refused there by name."""

import pytest
import torch

from tests.train.plans import recipe_with
from trainer.engine.assemble.device_features import require_features
from trainer.engine.core.errors import EnvironmentFault
from trainer.engine.doctor import torch_checks
from trainer.engine.launch.environment import World
from trainer.engine.launch.group import pick_device
from trainer.engine.precision.hardware import multiplies_bf16, require_formats
from trainer.kernels.choose import UnavailableKernelsError, choose

MPS = torch.device("mps")


@pytest.fixture
def on_apple(monkeypatch):
    monkeypatch.delenv("TRAINER_DEVICE", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)


def test_one_process_takes_the_gpu_and_several_the_cpu(on_apple, monkeypatch):
    assert pick_device(World()) == MPS
    several = World(rank=1, world_size=2, local_rank=1, local_world_size=2)
    assert pick_device(several) == torch.device("cpu")
    monkeypatch.setenv("TRAINER_DEVICE", "cpu")
    assert pick_device(World()) == torch.device("cpu")


def test_a_machine_without_it_computes_on_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert pick_device(World()) == torch.device("cpu")


def test_doctor_names_the_device_and_what_it_computes_in(on_apple):
    found = {finding.subject: finding for finding in torch_checks.check_devices()}
    assert "not tested" in found["mps"].text
    assert "fp32" in found["mps computes in"].text
    assert not multiplies_bf16(MPS)[0]


def refuse(recipe):
    require_formats(recipe.precision, recipe.model, MPS)
    require_features(recipe, MPS)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"compile": {"enabled": True}}, "compile.enabled = true"),
        ({"checkpoint": {"mode": "async_pinned"}}, "async_pinned"),
        ({"precision": {"float8": {"enabled": True, "emulate": True}}}, "precision.float8"),
    ],
)
def test_what_it_lacks_is_refused_by_name(changes, text):
    recipe = recipe_with(**changes)
    with pytest.raises(EnvironmentFault, match=text) as error:
        refuse(recipe)
    assert "TRAINER_DEVICE=cpu" in error.value.hint


def test_kernels_of_triton_are_refused_and_not_chosen():
    assert not any(
        reason.startswith("triton") for reason in choose({}, "mps", 256).reasons.values()
    )
    with pytest.raises(UnavailableKernelsError, match="this is a MPS"):
        choose({"permute": "triton"}, "mps", 256)
