"""A plain module of a plugin: initial values, buffers, compute dtype, and what its config says."""

from typing import Literal

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from trainer.engine.core.errors import RecipeError
from trainer.engine.estimate.simulate.torch_internals import fake_process_group
from trainer.engine.parallel.blocks import transform_blocks
from trainer.engine.parallel.materialize import materialize, without_storage
from trainer.engine.parallel.plan import make_plan
from trainer.engine.parallel.tables import Memory, Parallel
from trainer.plugins import Model, ModelConfig


class Picture(Model):
    """A small network of torch's own layers."""

    def __init__(self, width=64, scale_shape=(1,)):
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(scale_shape))
        self.conv = nn.Conv2d(3, width, 3)
        self.norm = nn.BatchNorm2d(width)
        self.out = nn.Linear(width, 5)

    def forward(self, image):
        return self.out(F.relu(self.norm(self.conv(image))).mean((2, 3))) * self.scale


class PictureConfig(ModelConfig):
    """Sizes of a `Picture`."""

    name: Literal["picture"] = "picture"
    width: int = 64

    def build(self, kernels):
        return Picture(self.width)


def picture():
    with without_storage():
        model = Picture()
    materialize(model, torch.device("cpu"), seed=3)
    return model


def test_weights_start_by_their_fan_in_biases_at_0_and_scales_at_1():
    model = picture()
    assert model.conv.weight.std().item() == pytest.approx((3 * 9) ** -0.5, rel=0.05)
    assert model.out.weight.std().item() == pytest.approx(64**-0.5, rel=0.1)
    assert not model.conv.bias.any()
    assert not model.out.bias.any()
    assert (model.norm.weight == 1).all()
    assert model.scale == 1
    again = picture().state_dict()
    assert all(torch.equal(value, again[name]) for name, value in model.state_dict().items())


def test_batch_norms_start_as_torch_starts_them():
    ours, theirs = picture().norm, nn.BatchNorm2d(64)
    assert [*dict(ours.named_buffers())] == [*dict(theirs.named_buffers())]
    for mine, other in zip(ours.buffers(), theirs.buffers(), strict=True):
        assert torch.equal(mine, other)


def test_a_buffer_that_no_method_fills_is_named():
    class Masked(Picture):
        def __init__(self):
            super().__init__()
            self.inner = nn.Module()
            self.inner.register_buffer("table", torch.arange(4))

    with without_storage():
        model = Masked()
    with pytest.raises(NotImplementedError, match=r"Masked\.init_buffers must fill inner\.table"):
        materialize(model, torch.device("cpu"), seed=3)


def test_a_lower_compute_dtype_is_torchs_autocast():
    model, image = picture(), torch.randn(2, 3, 8, 8)
    exact = model(image=image)
    model.compute_dtype = torch.bfloat16
    found = model(image=image)
    assert not torch.equal(found, exact)
    with torch.autocast("cpu", torch.bfloat16):
        expected = model.forward(image)
    assert torch.equal(found, expected)
    torch.testing.assert_close(found.float(), exact, atol=0.05, rtol=0.05)


def test_a_config_needs_only_its_name_and_build():
    config = PictureConfig(width=8)
    assert config.default_task == "supervised"
    assert config.vocab == 0
    assert config.with_vocab(300) is config
    assert config.parameter_shapes() == {}


def shard(model):
    with fake_process_group(0, 2):
        plan = make_plan(Parallel(shard=2), 0, 2, torch.device("cpu"), is_simulated=True)
        plan.split(model, PictureConfig(), torch.float32, torch.float32)


def test_a_model_without_blocks_is_one_unit_of_fsdp_and_of_recomputation():
    with without_storage():
        model = PictureConfig().build(None)
    transform_blocks(model, PictureConfig.layout, Memory(recompute="full"), None)
    shard(model)
    assert [name for name, module in model.named_modules() if hasattr(module, "unshard")] == [""]
    assert model.conv.weight.to_local().shape[0] == 32


def test_a_scalar_parameter_is_refused_by_its_name_where_fsdp_shards():
    with without_storage():
        model = Picture(scale_shape=())
    with pytest.raises(RecipeError, match="FSDP cannot shard scale, which is a scalar"):
        shard(model)
