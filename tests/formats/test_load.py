"""A Hugging Face folder gives transformers' logits, by every way of loading it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.conversion.models import transformers_model
from tests.distributed import run_ranks
from tests.formats.hf_folders import (
    INDEX,
    SIZES,
    SOFTMAX,
    VARIANTS,
    config_of,
    empty_model,
    weights_of,
    write,
    write_shards,
)
from tests.train import processes
from trainer.engine.assemble.assemble import assemble
from trainer.engine.formats.hf_load import load_huggingface
from trainer.engine.launch.environment import World
from trainer.engine.recipe.schema import Recipe


@pytest.mark.parametrize("shard_size", ["1GB", "20KB"])
@pytest.mark.parametrize("variant", list(VARIANTS))
def test_logits_equal_transformers(tmp_path: Path, variant: str, shard_size: str) -> None:
    config = config_of(**VARIANTS[variant])
    theirs, ours = transformers_model(config), empty_model(config)
    theirs.save_pretrained(tmp_path, max_shard_size=shard_size)
    assert (tmp_path / INDEX).exists() == (shard_size == "20KB")
    assert load_huggingface(tmp_path, ours, config) == []
    tokens = torch.randint(config.vocab, (2, 100), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, atol=1e-5, rtol=1e-5)


def test_a_block_that_predicts_farther_ahead_may_come_with_copies(tmp_path: Path) -> None:
    config = config_of("deepseek_v3", mtp_depth=1, moe=SOFTMAX)
    tensors = weights_of(config)
    copies = ("embed_tokens.weight", "shared_head.head.weight")
    copied = {f"model.layers.2.{name}": tensors["lm_head.weight"].clone() for name in copies}
    write(tmp_path, tensors | copied, config.hf_config())
    ours = empty_model(config)
    assert load_huggingface(tmp_path, ours, config) == []
    joined = ours.get_parameter("layers.2.join.weight")
    assert torch.equal(joined, tensors["model.layers.2.eh_proj.weight"])


def test_a_run_starts_from_the_folder(tmp_path: Path) -> None:
    config = config_of()
    tensors = weights_of(config)
    source = write_shards(tmp_path / "source", tensors)
    recipe = processes.write_recipe(tmp_path / "work", steps=1)
    sizes = [f"model.{key}={value}" for key, value in SIZES.items()]
    overrides = [*sizes, f"run.init_from={source}", "optimizer.lr=1e-30", "schedule.warmup_steps=0"]
    assert processes.finish(processes.start(recipe, overrides=overrides)) == [0]
    _, saved = processes.tensors(recipe.parent)
    for name, tensor in tensors.items():
        assert torch.equal(saved[f"model.{config.layout.from_hf(name)}"], tensor), name


def test_a_run_says_what_is_wrong_and_ends_with_5(tmp_path: Path) -> None:
    recipe = processes.write_recipe(tmp_path / "work", steps=1)
    source = write(tmp_path / "source", {"other.weight": torch.zeros(2)})
    overrides = [f"run.init_from={source}", "schedule.warmup_steps=0"]
    assert processes.finish(processes.start(recipe, overrides=overrides)) == [5]
    complaint = processes.complaints(recipe)
    assert "model.norm.weight (head.norm.weight here) is not in the folder" in complaint
    assert "Traceback" not in complaint


UNEVEN = {"head_dim": 4, "n_kv_heads": 1}  # 4 rows of keys on 3 ranks: 2, 2 and none


def load_sharded(source: str, shards: int) -> dict[str, Any]:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    values = {
        "run": {"steps": 1, "init_from": source},
        "model": SIZES | UNEVEN,
        "data": {"seq_len": 32, "global_batch": 6, "sources": [{"name": "synthetic"}]},
        "parallel": {"shard": shards, "replicate": size // shards},
    }
    world = World(rank=rank, world_size=size, local_rank=rank, local_world_size=size)
    parts = assemble(Recipe.model_validate(values), world, torch.device("cpu"))
    return {
        name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().numpy()
        for name, p in parts.model.named_parameters()
    }


@pytest.mark.parametrize(("world", "shards"), [(2, 2), (3, 3), (4, 2), (2, 1)])
def test_every_plan_reads_the_same_weights(tmp_path: Path, world: int, shards: int) -> None:
    config = config_of(**UNEVEN)
    tensors = weights_of(config)
    source = write_shards(tmp_path / "source", tensors)
    for loaded in run_ranks(world, load_sharded, str(source), shards):
        for name, values in loaded.items():
            expected = tensors[config.layout.to_hf(name) or ""]
            assert torch.equal(torch.from_numpy(values), expected), name


def load_split_by_columns(source: str) -> list[Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh, config = init_device_mesh("cpu", (2,)), config_of()
    model = empty_model(config)
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, nn.Parameter) and weight.dim() == 2:
            module.weight = nn.Parameter(distribute_tensor(weight.data, mesh, [Shard(1)]))
    load_huggingface(Path(source), model, config)
    return [p.to_local().detach().numpy() for p in model.parameters() if p.dim() == 2]


def test_a_parameter_split_by_columns_takes_its_columns(tmp_path: Path) -> None:
    config = config_of()
    tensors = weights_of(config)
    source = write(tmp_path / "source", tensors)
    names = [name for name, p in empty_model(config).named_parameters() if p.dim() == 2]
    for rank, parts in enumerate(run_ranks(2, load_split_by_columns, str(source))):
        for name, part in zip(names, parts, strict=True):
            expected = tensors[config.layout.to_hf(name) or ""].chunk(2, dim=1)[rank]
            assert torch.equal(torch.from_numpy(part), expected), name


def test_weights_take_the_dtype_of_the_parameters(tmp_path: Path) -> None:
    config = config_of()
    tensors = {name: tensor.bfloat16() for name, tensor in weights_of(config).items()}
    tensors["model.norm.weight"] = tensors["model.norm.weight"].double()
    model = empty_model(config)
    load_huggingface(write(tmp_path / "source", tensors), model, config)
    for name, parameter in model.named_parameters():
        assert parameter.dtype is torch.float32
        assert torch.equal(parameter, tensors[config.layout.to_hf(name) or ""].float())


def test_a_cache_of_links_is_read(tmp_path: Path) -> None:
    """Hugging Face's cache keeps a snapshot's files elsewhere, under their hashes."""
    config = config_of()
    original = write_shards(tmp_path / "blobs", weights_of(config))
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for number, file in enumerate(sorted(original.iterdir())):
        blob = file.rename(original / f"{number:040x}")
        (snapshot / file.name).symlink_to(Path("..") / "blobs" / blob.name)
    load_huggingface(snapshot, empty_model(config), config)


def test_without_config_json_the_user_is_told(tmp_path: Path) -> None:
    config = config_of()
    source = write(tmp_path / "source", weights_of(config))
    [note] = load_huggingface(source, empty_model(config), config)
    assert "has no config.json: only names and shapes were compared" in note


def test_rotary_frequencies_of_old_folders_are_ignored(tmp_path: Path) -> None:
    config = config_of()
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}
    source = write(tmp_path / "source", weights_of(config) | extra)
    load_huggingface(source, empty_model(config), config)


def test_an_untied_model_starts_from_a_tied_folder(tmp_path: Path) -> None:
    tied, untied = config_of(tie_embeddings=True), config_of()
    tensors = weights_of(tied)
    source = write(tmp_path / "source", tensors, tied.hf_config())
    model = empty_model(untied)
    [note] = load_huggingface(source, model, untied)
    assert note == "lm_head.weight is not in the folder: head.proj.weight starts as the embedding"
    assert torch.equal(
        model.get_parameter("head.proj.weight"), tensors["model.embed_tokens.weight"]
    )


def test_a_tied_model_takes_a_projection_that_equals_the_embedding(tmp_path: Path) -> None:
    tied = config_of(tie_embeddings=True)
    tensors = weights_of(tied)
    embedding = tensors["model.embed_tokens.weight"]
    source = write(tmp_path / "source", tensors | {"lm_head.weight": embedding.clone()})
    load_huggingface(source, empty_model(tied), tied)
