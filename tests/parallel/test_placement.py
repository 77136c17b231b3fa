"""The placement of every parameter, told without building the model."""

import subprocess
import sys

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard

from tests.train.plans import recipe_with
from trainer.engine.estimate.simulate.torch_internals import fake_process_group
from trainer.engine.lora.apply import add_adapters
from trainer.engine.lora.sizes import with_adapters
from trainer.engine.lora.tables import LoRA
from trainer.engine.parallel.materialize import without_storage
from trainer.engine.parallel.mesh import Degrees
from trainer.engine.parallel.placement import aligns
from trainer.engine.recipe.placements import placements
from trainer.kernels.choose import choose
from trainer.kernels.torch_private import compute_local_shape_and_global_offset
from trainer.model_zoo.llama3.config import Llama3Config


def by_name(degrees, **changes):
    return {each.name: each for each in placements(recipe_with(**changes), degrees, 257)}


@pytest.mark.parametrize("targets", [["*"], ["*.[qkv].weight", "re:down"], ["layers.1.mlp.up.*"]])
def test_adapters_have_the_names_and_shapes_of_the_real_ones(targets):
    config, table = Llama3Config(vocab_size=64), LoRA(rank=3, targets=targets)
    with without_storage():
        model = config.build(choose({}, "cpu", 16))
        add_adapters(model, config.layout, table)
    found = [(name, tuple(weight.shape)) for name, weight in model.named_parameters()]
    assert list(with_adapters(config, table).items()) == found


def test_the_first_rule_that_matches_decides():
    rules = [
        {"match": r"layers\.0\..*", "place": {"shard": 1}},
        {"match": r".*\.mlp\.up\.weight", "place": {"tensor": 1}},
        {"match": r"head\.norm\.weight", "place": {}},
    ]
    # Not to train: FSDP cannot cut dim 1 of a norm.
    found = by_name(Degrees(shard=2, tensor=2), parallel={"rules": rules})
    assert found["layers.0.mlp.up.weight"].place == {"shard": 1, "tensor": None}
    assert found["layers.0.mlp.up.weight"].decided_by == r'rules.0 "layers\.0\..*"'
    assert found["layers.1.mlp.up.weight"].place == {"shard": 0, "tensor": 1}
    assert found["head.norm.weight"].place == {"shard": None, "tensor": None}
    assert found["head.norm.weight"].decided_by == r'rules.2 "head\.norm\.weight"'
    assert found["head.proj.weight"].decided_by == 'style "columns"'
    assert found["embed.weight"].shape == (320, 32)


def test_what_no_rule_decides_follows_the_plan():
    assert {each.decided_by for each in by_name(Degrees()).values()} == {"whole"}
    sharded = by_name(Degrees(shard=2)).values()
    assert {each.decided_by for each in sharded} == {"fsdp"}
    assert {each.place["shard"] for each in sharded} == {0}
    split = by_name(Degrees(tensor=4))
    assert split["layers.0.attention.k.weight"].place["tensor"] is None  # two heads, four ranks
    assert split["layers.0.attention.k.weight"].decided_by == 'style "key_value"'
    assert split["layers.0.mlp.down.weight"].place == {"shard": None, "tensor": 1}


def test_it_needs_no_torch():
    code = "import sys, trainer.engine.parallel.placement; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-P", "-c", code]).returncode == 0


@pytest.mark.parametrize(("shard", "tensor"), [(2, 2), (3, 2), (4, 2), (4, 3)])
def test_uneven_shards_are_known_where_torch_would_misplace_them(shard, tensor):
    """What FSDP gives each rank, by torch.chunk, against what a DTensor says that it has."""
    degrees, lengths = Degrees(shard=shard, tensor=tensor), range(shard * tensor, 60)
    wrong = set()
    for rank in range(shard * tensor):
        with fake_process_group(rank, shard * tensor):
            mesh = init_device_mesh("cpu", (shard, tensor))
            places = [StridedShard(0, split_factor=tensor), Shard(0)]
            for length in lengths:
                of_tensor = torch.arange(length).tensor_split(_ends(length, tensor))[rank % tensor]
                ends = _ends(len(of_tensor), shard)
                held = of_tensor.tensor_split(ends)[rank // tensor]
                (said,), _ = compute_local_shape_and_global_offset((length,), mesh, places)
                if said != len(held):
                    wrong.add(length)
    assert {length for length in lengths if not aligns(length, degrees)} == wrong
    assert bool(wrong) == (shard > 2)


def _ends(length, ranks):
    """Return where the pieces of torch.chunk end, which leaves out empty ones."""
    piece = -(-length // ranks)
    return [min(length, rank * piece) for rank in range(1, ranks)]
