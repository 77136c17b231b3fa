"""Initial weights do not depend on how many ranks hold them, nor how."""

import hashlib

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.distributed import run_ranks
from trainer.engine.estimate.simulate.tracker import MemoryTracker
from trainer.engine.parallel import materialize as filling
from trainer.engine.parallel.materialize import BLOCK, materialize, without_storage
from trainer.kernels.choose import choose
from trainer.model_zoo.llama3.config import Llama3Config
from trainer.model_zoo.qwen3.config import Qwen3Config

# Rows of the vocabulary do not divide by 2, 3 or 4, and the embedding fills more than one block.
CONFIG = Llama3Config(
    dim=24, n_layers=2, n_heads=2, n_kv_heads=1, ffn_dim=43, vocab_size=BLOCK // 16 + 1
)
# A stack of experts fills several blocks.
EXPERTS = Qwen3Config(
    dim=24,
    n_layers=1,
    n_heads=2,
    n_kv_heads=1,
    head_dim=12,
    vocab_size=10,
    moe={"num_experts": 6, "expert_ffn_dim": 8004},
)
CPU = torch.device("cpu")


def empty_model(config=CONFIG):
    with without_storage():
        return config.build(choose({}, "cpu", 8))


def digests(model):
    """Return a hash of every parameter's full values."""
    found = {}
    for name, parameter in model.named_parameters():
        full = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        found[name] = hashlib.sha256(full.detach().numpy().tobytes()).hexdigest()
    return found


def distributed(mesh_shape, placements, config):
    """Return a model on `meta` whose parameters are placed over a mesh."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    names = tuple("abc"[: len(mesh_shape)])
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
    model = empty_model(config)
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            places = [
                Replicate() if p == "r" else Shard(int(p) if int(p) < parameter.ndim else 0)
                for p in placements
            ]
            sharded = distribute_tensor(parameter.data, mesh, places, src_data_rank=None)
            setattr(module, name, torch.nn.Parameter(sharded))
    return model


def placed(mesh_shape, placements, config=CONFIG):
    """Return the digests of a model whose parameters are placed over a mesh."""
    model = distributed(mesh_shape, placements, config)
    before = dist.get_world_size()
    materialize(model, CPU, seed=5)
    assert dist.get_world_size() == before
    return digests(model)


def most_held(mesh_shape, placements):
    """Return the most that filling holds beside the model, and the bytes of a whole stack."""
    filling.CHUNK = BLOCK // 16
    model = distributed(mesh_shape, placements, EXPERTS)
    with MemoryTracker() as tracker:
        materialize(model, CPU, seed=5)
    mine = sum(each.to_local().nbytes for each in model.parameters())
    stack = model.layers[0].mlp.experts.gate_up
    return tracker.peak().total - mine, stack.numel() * 4, len(stack)


def fully_sharded():
    from torch.distributed.fsdp import fully_shard

    model = empty_model()
    for block in model.layers:
        fully_shard(block)
    fully_shard(model)
    materialize(model, CPU, seed=5)
    return digests(model)


@pytest.fixture(scope="module")
def alone():
    model = empty_model()
    materialize(model, CPU, seed=5)
    return digests(model)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_fsdp_ranks_start_with_one_process_s_weights(world, alone):
    assert run_ranks(world, fully_sharded) == [alone] * world


@pytest.mark.parametrize(
    ("mesh", "placements"),
    [((3,), "0"), ((2,), "1"), ((2,), "r"), ((2, 2), "r0"), ((2, 2), "01"), ((2, 2), "00")],
)
def test_any_placement_holds_one_process_s_weights(mesh, placements, alone):
    world = int(np.prod(mesh))
    assert run_ranks(world, placed, mesh, placements) == [alone] * world


@pytest.mark.parametrize(("mesh", "placements"), [((3,), "2"), ((2, 2), "01")])
def test_any_part_of_stacked_experts_holds_one_process_s_weights(mesh, placements):
    model = empty_model(EXPERTS)
    materialize(model, CPU, seed=5)
    world = int(np.prod(mesh))
    assert run_ranks(world, placed, mesh, placements, EXPERTS) == [digests(model)] * world


def test_a_part_of_stacked_experts_is_filled_without_the_stack():
    for more, stack, experts in run_ranks(2, most_held, (2,), "1"):
        assert 0 < more < 1.1 * stack / experts, "a matrix at a time"


def test_weights_depend_on_seed_and_name_but_not_on_the_rest_of_the_model(alone):
    model = empty_model()
    materialize(model, CPU, seed=6)
    other = digests(model)
    assert all(other[name] != alone[name] for name in alone if not name.endswith("norm.weight"))
    assert len({alone["layers.0.attention.q.weight"], alone["layers.1.attention.q.weight"]}) == 2
    deeper = empty_model(CONFIG.model_copy(update={"n_layers": 3, "vocab_size": 7}))
    materialize(deeper, CPU, seed=5)
    assert digests(deeper)["layers.1.mlp.up.weight"] == alone["layers.1.mlp.up.weight"]


def test_weights_are_normal_and_cut_off_at_three_deviations():
    model = empty_model()
    materialize(model, CPU, seed=5)
    values = model.embed.weight.detach().flatten().double() / CONFIG.init_std
    assert values.abs().max() <= 3.0
    cut = torch.special.ndtr(torch.tensor(-3.0, dtype=torch.float64))
    distribution = (torch.special.ndtr(values.sort().values) - cut) / (1 - 2 * cut)
    steps = (torch.arange(len(values)) + 0.5) / len(values)
    # Kolmogorov-Smirnov: beyond 2 / sqrt(n) with a probability of 7e-4.
    assert (distribution - steps).abs().max() < 2 / len(values) ** 0.5
    blocks = values[: 2 * (len(values) // 2)].view(2, -1)
    assert torch.corrcoef(blocks)[0, 1].abs() < 5e-3


def test_weights_that_write_to_the_residual_stream_start_smaller_with_depth():
    model = empty_model()
    materialize(model, CPU, seed=5)
    block = model.layers[0]
    wide, narrow = block.mlp.up.weight.std(), block.mlp.down.weight.std()
    assert (wide / narrow).item() == pytest.approx((2 * CONFIG.n_layers) ** 0.5, rel=0.1)


def test_norms_start_at_one_and_rotary_frequencies_are_computed():
    model = empty_model()
    materialize(model, CPU, seed=5)
    assert torch.equal(model.head.norm.weight, torch.ones(CONFIG.dim))
    assert model.frequencies.device == CPU
    assert model.frequencies[0] == 1.0


def test_without_filling_memory_is_there_but_no_values_are_drawn(monkeypatch):
    monkeypatch.setattr(
        "trainer.engine.parallel.materialize._fill", lambda *_: pytest.fail("drawn")
    )
    model = empty_model()
    materialize(model, CPU, seed=5, fill=False)
    assert {p.device.type for p in model.parameters()} == {"cpu"}
    assert model.frequencies[0] == 1.0
