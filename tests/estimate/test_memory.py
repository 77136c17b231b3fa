"""The estimated peak is what a real step of the same recipe counts."""

import os

import pytest
import torch

from tests.distributed import run_ranks
from trainer.engine.assemble import build_model, build_step
from trainer.engine.estimate.simulate import simulate, track
from trainer.engine.parallel.materialize import materialize
from trainer.engine.parallel.plan import make_plan
from trainer.engine.recipe.schema import Recipe

BASE = {
    "run": {"steps": 20},
    "model": {"dim": 128, "n_layers": 4, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 256},
    "data": {"seq_len": 128, "global_batch": 8, "micro_batch": 2, "packing": "documents"},
    "precision": {"compute": "bf16"},
}
CPU = torch.device("cpu")
VOCAB = 1000
PLANS = {
    "alone": (1, {}),
    "shard": (2, {"shard": 2}),
    "tensor": (2, {"tensor": 2}),
    "context": (2, {"context": 2}),
    "pipeline": (2, {"pipeline": 2}),
    "shard-tensor": (4, {"shard": 2, "tensor": 2}),
    "pipeline-shard": (4, {"pipeline": 2, "shard": 2, "pipelining": {"schedule": "ZBVZeroBubble"}}),
}


def counted(recipe):
    """Return the peak of this rank's real steps."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    plan = make_plan(recipe.parallel, rank, ranks, CPU)
    built = build_model(recipe, VOCAB, CPU, plan)
    materialize(built.model, CPU, 0)
    return track(recipe, build_step(recipe, built, plan), plan.take).peak


def simulated(recipe, rank, ranks):
    found = simulate(recipe, rank, ranks, VOCAB)
    assert sum(found.at_peak.values()) == found.peak_bytes
    return found.peak_bytes


@pytest.mark.parametrize("plan", list(PLANS))
def test_the_estimate_is_what_real_steps_count(plan):
    ranks, parallel = PLANS[plan]
    recipe = Recipe.model_validate(BASE | {"parallel": parallel})
    for rank, expected in enumerate(run_ranks(ranks, counted, recipe)):
        (found,) = run_ranks(1, simulated, recipe, rank, ranks)
        assert found == pytest.approx(expected, rel=0.01)
