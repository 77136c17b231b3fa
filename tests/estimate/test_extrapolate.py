"""A few blocks and micro batches tell what many need; what they cannot tell is run whole."""

from dataclasses import replace

import pytest

from tests.distributed import run_ranks
from trainer.engine.estimate.memory import line_through
from trainer.engine.estimate.simulate.extrapolate import Simulation, simulate_memory
from trainer.engine.estimate.simulate.sizes import (
    enough_micro_batches,
    have_identical_blocks,
    size_of,
)
from trainer.engine.parallel.mesh import Degrees
from trainer.engine.recipe.schema import Recipe

BASE = {
    "run": {"steps": 20},
    "model": {"dim": 64, "n_layers": 7, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 128},
    "data": {"seq_len": 64, "global_batch": 6, "micro_batch": 1},
    "parallel": {},
}
LOSSES = 1024
"""bytes that a pipeline keeps of each micro batch: its loss, and a copy"""
PLANS = {
    "alone": (1, {}),
    "recomputed": (2, {"memory": {"recompute": "full"}, "parallel": {"shard": 2}}),
    "selected": (2, {"memory": {"recompute": "selective"}, "parallel": {"tensor": 2}}),
    "in-backward": (
        2,
        {
            "memory": {"optimizer_in_backward": True},
            "optimizer": {"clip_norm": 0.0},
            "data": BASE["data"] | {"micro_batch": 3},
            "parallel": {"shard": 2},
        },
    ),
    "1F1B": (2, {"model": BASE["model"] | {"n_layers": 13}, "parallel": {"pipeline": 2}}),
    "looped": (
        4,
        {
            "model": BASE["model"] | {"n_layers": 26},
            "parallel": {
                "pipeline": 2,
                "shard": 2,
                "pipelining": {"schedule": "Interleaved1F1B", "micro_batches": 6},
            },
            "data": BASE["data"] | {"global_batch": 12},
        },
    ),
    "every second": (1, {"memory": {"recompute": "every_n"}}),
    "sgd": (1, {"optimizer": {"name": "sgd", "momentum": 0.9}, "ema": {"decay": 0.9}}),
}


def peak(recipe, rank, ranks, whole):
    return simulate_memory(recipe, rank, ranks, 500, on_gpu=True, whole=whole)


@pytest.mark.matrix
@pytest.mark.parametrize("plan", PLANS)
def test_short_runs_tell_the_peak_of_the_whole_one(plan):
    ranks, changes = PLANS[plan]
    recipe = Recipe.model_validate(BASE | changes)
    left = LOSSES * recipe.data.global_batch if recipe.parallel.pipeline > 1 else 0
    for rank in {0, ranks // recipe.parallel.pipeline * (recipe.parallel.pipeline - 1)}:
        (short,) = run_ranks(1, peak, recipe, rank, ranks, False, timeout=900)
        (whole,) = run_ranks(1, peak, recipe, rank, ranks, True, timeout=900)
        assert short.peak_bytes == pytest.approx(whole.peak_bytes, abs=left, rel=0)
        if not left:
            assert short.at_peak == whole.at_peak


@pytest.mark.parametrize(
    "changes",
    [
        {"memory": {"recompute": "every_n"}},
        {"lora": {"rank": 2, "targets": ["layers.3.*.q.weight"]}},
        {"optimizer": {"groups": [{"match": "layers.5.*", "lr": 0.1}]}},
        {"parallel": {"tensor": 2, "rules": [{"match": "layers.1.*", "place": {"tensor": None}}]}},
    ],
)
def test_blocks_that_differ_are_seen(changes):
    def alike(recipe):
        return have_identical_blocks([recipe], Degrees(tensor=2), 500)

    assert alike(Recipe.model_validate(BASE))
    assert not alike(Recipe.model_validate(BASE | changes))


def test_as_many_micro_batches_as_show_all_that_a_rank_does():
    def enough(schedule, count):
        parallel = {"pipeline": 4, "shard": 1, "pipelining": {"schedule": schedule}}
        data, model = BASE["data"] | {"global_batch": count}, BASE["model"] | {"n_layers": 8}
        recipe = Recipe.model_validate({"parallel": parallel, "data": data, "model": model})
        table, size = recipe.parallel.pipelining, size_of(recipe, 4, 500)
        assert size.micro_batches == count
        return [enough_micro_batches(table, size, place) for place in range(4)]

    assert enough("1F1B", 64) == [5, 4, 3, 3]
    assert enough("GPipe", 16) == [16] * 4  # all are in flight at once
    assert max(enough("Interleaved1F1B", 64)) < 24
    assert max(enough("ZBVZeroBubble", 64)) < 24


def test_stages_between_two_are_read_off_a_line_only_if_they_are_on_it():
    first = Simulation(2, 100, {"parameters": 40, "activations": 60}, 0)
    second = replace(first, rank=4, peak_bytes=90, at_peak={"parameters": 40, "activations": 50})
    last = replace(first, rank=8, peak_bytes=70, at_peak={"parameters": 40, "activations": 30})
    line = line_through(first, second, last, 3)
    third = Simulation(6, 80, {"parameters": 40, "activations": 40}, 0)
    assert line(2, 6) == third
    assert line_through(first, second, replace(last, peak_bytes=75), 3) is None
