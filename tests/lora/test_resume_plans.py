"""Adapters go on under another plan, and what is exported at the end is the same."""

import pytest
from safetensors.numpy import load_file

from tests.train.processes import complaints, finish, rows, start, write_recipe

SETTINGS = ["schedule.name=constant", "schedule.warmup_steps=0", "precision.compute=fp32"]
# AdamW divides by gradients near zero: its weights compare rounding.
SETTINGS += ["optimizer.name=sgd", "optimizer.lr=0.5", "optimizer.momentum=0.9"]
SETTINGS += ["evaluate.interval=0", "lora.rank=3", "checkpoint.export=hf", "model.init_std=0.1"]
PLANS = [(4, "fsdp:2,tp:2"), (2, "pp:2"), (4, "tp:4")]
EXPORTED = ("adapter/adapter_model.safetensors", "hf/model.safetensors")


def test_it_ends_with_the_adapters_and_the_merged_weights_of_one_process(tmp_path):
    """Four ranks share two key-value heads at the end."""
    alone, folder = tmp_path / "alone", tmp_path / "split"
    steps = len(PLANS)
    assert finish(start(write_recipe(alone, steps), 1, 0, SETTINGS), 120) == [0]
    recipe = write_recipe(folder, steps)
    for step, (ranks, mesh) in enumerate(PLANS, 1):
        settings = [*SETTINGS, f"parallel.mesh={mesh}", f"run.steps={step}"]
        settings += ["checkpoint.export=none"] * (step < steps)
        processes = start(recipe, ranks, step, settings)
        assert finish(processes, 240) == [0] * ranks, complaints(recipe)
    losses = [row["loss"] for row in rows(folder)]
    assert losses == pytest.approx([row["loss"] for row in rows(alone)], abs=1e-5)
    for name in EXPORTED:
        found, expected = load_file(folder / "run" / name), load_file(alone / "run" / name)
        assert found.keys() == expected.keys()
        for key, tensor in expected.items():
            assert found[key] == pytest.approx(tensor, abs=1e-5), key
