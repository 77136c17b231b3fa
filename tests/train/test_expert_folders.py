"""Experts that ranks share, written to folders of Hugging Face's and read from them."""

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from tests.conversion.models import loaded_by_transformers
from tests.train.processes import EXPERTS, complaints, finish, rows, start, tensors, write_recipe
from trainer.cli.convert_ckpt import app
from trainer.engine.inference.inputs import Dtype
from trainer.engine.inference.open import open_model

SETTINGS = ["precision.compute=fp32", "schedule.name=constant", "evaluate.interval=0"]
SETTINGS += ["checkpoint.mode=sync", "schedule.warmup_steps=0"]
HYBRID = ["parallel.replicate=2", "parallel.fsdp.strategy=hybrid_shard"]
TOKENS = torch.arange(40).unsqueeze(0)


def train(recipe, world, *settings):
    processes = start(recipe, world, 0, [*SETTINGS, *settings])
    assert finish(processes, 240) == [0] * world, complaints(recipe)


@pytest.mark.parametrize(
    ("world", "parallel"),
    [
        (4, ["parallel.expert=2", "parallel.pipeline=2"]),
        pytest.param(4, ["parallel.expert=2"], marks=pytest.mark.matrix),
        # Three ranks cannot share four experts evenly: they cut columns.
        pytest.param(6, ["parallel.expert=2"], marks=pytest.mark.matrix),
        pytest.param(4, ["parallel.expert=2", *HYBRID], marks=pytest.mark.matrix),
        pytest.param(4, ["parallel.expert_tensor=2"], marks=pytest.mark.matrix),
    ],
    ids=["pipeline", "shard", "columns", "hybrid", "divided"],
)
def test_folders_hold_all_experts(world, parallel, tmp_path):
    recipe = write_recipe(tmp_path / "run", 2, EXPERTS)
    train(recipe, world, *parallel, "checkpoint.export=hf", "data.global_batch=24")
    run, converted = tmp_path / "run" / "run", tmp_path / "converted"
    with torch.inference_mode():
        theirs = loaded_by_transformers(run / "hf")(TOKENS).logits
        ours = open_model(run, dtype=Dtype.FP32).model(TOKENS)
    torch.testing.assert_close(theirs, ours, atol=1e-5, rtol=1e-5)
    done = CliRunner().invoke(app, ["dcp2hf", str(run), str(converted), "--verify"])
    assert done.exit_code == 0, done.output
    exported = load_file(run / "hf" / "model.safetensors")
    for name, tensor in load_file(converted / "model.safetensors").items():
        assert torch.equal(exported.pop(name), tensor), name
    assert not exported


@pytest.mark.matrix
def test_ranks_read_their_experts_from_a_folder(tmp_path):
    first = write_recipe(tmp_path / "first", 2, EXPERTS)
    train(first, 1, "checkpoint.export=hf")
    found = {}
    for name, world, parallel in (("alone", 1, []), ("shared", 4, ["parallel.expert=2"])):
        recipe = write_recipe(tmp_path / name, 3, EXPERTS)
        # AdamW divides by little at first: rounding would be all that is seen.
        eps = "optimizer.eps=1e-4"
        train(recipe, world, eps, *parallel, f"run.init_from={tmp_path / 'first' / 'run' / 'hf'}")
        losses = [row["loss"] for row in rows(tmp_path / name)]
        found[name] = losses, tensors(tmp_path / name)[1]
    assert found["shared"][0] == pytest.approx(found["alone"][0], abs=1e-5)
    for name, tensor in found["alone"][1].items():
        if name.startswith("model."):
            torch.testing.assert_close(found["shared"][1][name], tensor, atol=1e-5, rtol=1e-5)
