"""What pipelines alone have: a weight at both ends, schedules in files, cuts through ends."""

import json
import os

import numpy as np
import pytest
import torch

from tests.cases import also, quick
from tests.conversion.models import tensors_of
from tests.conversion.run import convert
from tests.distributed import run_ranks
from tests.train.plans import BASE, assembled, by_one_process, recipe_with, train, whole
from tests.train.processes import complaints, finish, rows, start, tensors, write_recipe
from trainer.engine.core.errors import EnvironmentFault
from trainer.engine.data.batch import IGNORED
from trainer.engine.inference.generate import generate
from trainer.engine.inference.inputs import Dtype, Weights
from trainer.engine.inference.open import open_model
from trainer.engine.launch.environment import World
from trainer.engine.parallel.pipeline.pipeline import require_split_backward
from trainer.engine.train.evaluate import validate

TIED = BASE["model"] | {"tie_embeddings": True, "n_layers": 4, "vocab_size": 259}
SPLIT = TIED | {"tie_embeddings": False}
NAME = "embed.weight"


def curves_and_weights(recipe):
    """Return losses, gradient norms, the final validation loss and the weights of this rank."""
    parts = assembled(recipe)
    return *train(parts, steps=3), validate(parts)["loss"], whole(parts.model)


@pytest.fixture(scope="module")
def one_process():
    """Return what one process computes, computed once for each change of the recipe."""
    return by_one_process(curves_and_weights)


def assert_same(results, expected):
    *curves, weights = expected
    found = set()
    for *theirs, part in results:
        for got, wanted in zip(theirs, curves, strict=True):
            assert got == pytest.approx(wanted, abs=1e-5, rel=1e-5)
        for name, weight in part.items():
            np.testing.assert_allclose(weight, weights[name], atol=1e-5, rtol=1e-5, err_msg=name)
        found |= part.keys()
    assert found == weights.keys()


PLANS = {
    "1F1B": (2, {}),
    "InterleavedZeroBubble": (2, {"pipelining": {"schedule": "InterleavedZeroBubble"}}),
    "V": (2, {"pipelining": {"schedule": "ZBVZeroBubble"}}),
    "three": (3, {"pipeline": 3}),
    "tensor": (4, {"tensor": 2}),
    "shard-V": (4, {"shard": 2, "pipelining": {"schedule": "DualPipeV"}}),
    "offload": (4, {"shard": 2, "fsdp": {"offload": True}}),
}


@pytest.mark.parametrize("plan", quick(PLANS, "shard-V"))
def test_one_weight_at_both_ends(plan, one_process):
    """Both copies keep the same bits, and have those of one process, to rounding."""
    world, parallel = PLANS[plan]
    recipe = recipe_with(model=TIED, parallel={"pipeline": 2, **parallel})
    results = run_ranks(world, curves_and_weights, recipe, timeout=200)
    assert_same(results, one_process(model=TIED))
    copies = [part[NAME] for *_, part in results if NAME in part]
    assert all((copy == copies[0]).all() for copy in copies)


@pytest.mark.parametrize("plan", quick(PLANS, "1F1B"))
def test_groups_of_one_stage_alone_train_as_one_process_does(plan, one_process):
    """Only one rank has the parameters of the first group, and only one those of the second."""
    groups = [
        {"match": "embed.weight", "lr": 0.05, "weight_decay": 0.3},
        {"match": "re:^(norm|head)", "lr": 0.6},
    ]
    changes = {"model": SPLIT, "optimizer": BASE["optimizer"] | {"groups": groups}}
    world, parallel = PLANS[plan]
    recipe = recipe_with(parallel={"pipeline": 2, **parallel}, **changes)
    assert_same(run_ranks(world, curves_and_weights, recipe, timeout=200), one_process(**changes))


SETTINGS = [
    "schedule.name=constant",
    "precision.compute=fp32",
    "optimizer.name=sgd",  # AdamW divides by gradients near zero: its weights compare rounding
    "optimizer.lr=0.1",
    "optimizer.momentum=0.9",
    "schedule.warmup_steps=0",
    "model.tie_embeddings=true",
    "checkpoint.export=hf",
    "ema.decay=0.5",
    "evaluate.interval=1",
]


def run(recipe, world, attempt, *settings):
    processes = start(recipe, world, attempt, [*SETTINGS, *settings])
    assert finish(processes, 200) == [0] * world, complaints(recipe)


def sampled(path, which):
    """Return what ranks that share a model's blocks sample together."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    world = World(rank=rank, world_size=world_size, local_rank=rank, local_world_size=world_size)
    opened = open_model(path, weights=Weights(which), dtype=Dtype.FP32, world=world)
    prompts = ["a prompt", "one that is longer", ""]
    options = {"max_new_tokens": 12, "temperature": 2.0, "seed": 3}
    return generate(opened, prompts, **options)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("world", "plan"),
    [
        (4, ["parallel.shard=2"]),
        (
            4,
            ["parallel.tensor=2", "parallel.pipelining.schedule=ZBVZeroBubble", "model.n_layers=4"],
        ),
    ],
)
def test_a_pipeline_resumes_as_one_process_does_and_exports(world, plan, tmp_path):
    """With one weight at both ends and an average; the folders are those of a conversion, and the
    text that one process samples from them is that of two."""
    model = [each for each in plan if each.startswith("model")]
    alone = write_recipe(tmp_path / "alone", steps=3)
    run(alone, 1, 0, *model)
    split = write_recipe(tmp_path / "split", steps=3)
    pipeline = ["parallel.pipeline=2", *plan]
    run(split, world, 0, *pipeline, "run.steps=1")
    run(split, 1, 1, *model, "run.steps=2")
    run(split, world, 2, *pipeline)
    for kind in ("train", "eval"):
        losses = [row["loss"] for row in rows(tmp_path / "split", kind)]
        assert losses == pytest.approx(
            [r["loss"] for r in rows(tmp_path / "alone", kind)], abs=1e-5
        )
    (step, found), (_, expected) = tensors(tmp_path / "split"), tensors(tmp_path / "alone")
    assert step == 3
    assert {n for n in found if n.startswith(("model.", "ema.", "optimizer."))} == {
        n for n in expected if not n.startswith("rng.")
    }
    for name, tensor in expected.items():
        if name.startswith(("model.", "ema.")):
            torch.testing.assert_close(found[name], tensor, atol=1e-5, rtol=1e-5)
    source = tmp_path / "split" / "run"
    for folder, weights in (("hf", "model"), ("hf-ema", "ema")):
        converted = tmp_path / f"converted-{folder}"
        assert convert("dcp2hf", source, converted, "--weights", weights) == 0
        ours, theirs = tensors_of(source / folder), tensors_of(converted)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    path, which = (source, "ema") if plan[0] == "parallel.shard=2" else (source / "hf", "model")
    (text,) = run_ranks(1, sampled, path, which)
    assert run_ranks(2, sampled, path, which) == [text] * 2


UNEVEN = """
0F0,0F1,1F0,1F1,,,3F0,3I0,3F1,3I1,3W0,3W1,,1I0,1W0,0I0,1B1,0B1,0W0
,,,2F0,2F1,,,,2I0,2B1,2W0
"""
SPLIT_ENDS = """
0F0,0F1,0F2,,,,0B0,0B1,0B2
,1F0,1F1,1F2,,1I0,1I1,1I2,1W0,1W1,1W2
,,2F0,2B0,2F1,2B1,2F2,2B2
"""


@pytest.mark.parametrize(("tie", "shard"), [(True, 2), *also((False, 1))])
def test_a_schedule_from_a_file(tie, shard, tmp_path, one_process):
    """Four stages on two ranks, three of them on the first; passes in an order of nobody else's."""
    path = tmp_path / "schedule.csv"
    path.write_text(UNEVEN)
    model = TIED | {"tie_embeddings": tie}
    pipelining = {"csv": str(path), "micro_batches": 2}
    parallel = {"pipeline": 2, "shard": shard, "pipelining": pipelining}
    recipe = recipe_with(model=model, parallel=parallel)
    assert_same(run_ranks(2 * shard, curves_and_weights, recipe), one_process(model=model))


def test_ends_in_stages_of_their_own(tmp_path, one_process):
    """Embedding, blocks and head on three ranks, by a schedule of their own."""
    path = tmp_path / "schedule.csv"
    path.write_text(SPLIT_ENDS)
    blocks = [f"layers.{number}" for number in range(4)]
    pipelining = {
        "csv": str(path),
        "micro_batches": 3,
        "modules_per_stage": [["embed"], blocks, ["head"]],
    }
    data = BASE["data"] | {"global_batch": 6}
    recipe = recipe_with(model=TIED, data=data, parallel={"pipeline": 3, "pipelining": pipelining})
    expected = one_process(model=TIED, data=data)
    assert_same(run_ranks(3, curves_and_weights, recipe), expected)


def gradients(recipe):
    """Return each weight's gradient at the first step, and how many tokens each row counts."""
    parts = assembled(recipe)
    (*batches,) = next(parts.loader.steps(0))
    parts.step.accumulate(batches)
    found = {name: weight.grad.numpy() for name, weight in parts.model.named_parameters()}
    return found, [int((row != IGNORED).sum()) for batch in batches for row in batch.labels]


@pytest.mark.parametrize("schedule", ["InterleavedZeroBubble", *also("1F1B")])
def test_gradients_count_each_token_once(schedule, tmp_path):
    """Micro batches of few and of many valid tokens weigh by them, not the same."""
    lines = ("xy" if number % 2 else "a line that is much longer" for number in range(64))
    path = tmp_path / "lines.jsonl"
    path.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    sources = [{"name": "jsonl", "path": str(path)}]
    data = BASE["data"] | {"packing": "none", "sources": sources}
    changes = {"data": data, "optimizer": {"name": "sgd", "lr": 0.1, "clip_norm": 0.0}}
    changes["model"] = BASE["model"] | {"n_layers": 4}
    expected, tokens = run_ranks(1, gradients, recipe_with(**changes))[0]
    assert max(tokens) > 10 * min(tokens)
    pipelining = {"schedule": schedule, "micro_batches": 8}
    recipe = recipe_with(**changes, parallel={"pipeline": 2, "pipelining": pipelining})
    found = {}
    for part, _ in run_ranks(2, gradients, recipe):
        found |= part
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        scale = np.abs(gradient).max()
        np.testing.assert_allclose(found[name], gradient, atol=1e-5 * scale, err_msg=name)


@pytest.mark.parametrize("schedule", ["InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"])
def test_split_backward_passes_are_refused_before_torch_2_13(schedule, monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.12.1+cu130")
    with pytest.raises(EnvironmentFault, match=f"{schedule} splits.*torch 2.12.1"):
        require_split_backward(schedule)
    require_split_backward("Interleaved1F1B")
    monkeypatch.setattr(torch, "__version__", "2.13.0+cpu")
    require_split_backward(schedule)
