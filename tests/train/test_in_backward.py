"""The optimizer in the backward pass makes the weights that it makes after it."""

import pytest
import torch

from tests.cases import quick
from tests.distributed import run_ranks
from tests.train.outcomes import assert_equal, few_steps
from tests.train.plans import BASE, assembled, recipe_with
from tests.train.processes import complaints, finish, rows, start, tensors, write_recipe
from trainer.engine.estimate.simulate.instrumented import track
from trainer.engine.train.step import TrainStep

DATA = BASE["data"] | {"packing": "documents"}
WHOLE = DATA | {"micro_batch": 8}
IN_BACKWARD = {"optimizer_in_backward": True}
OPTIMIZERS = {
    "sgd": BASE["optimizer"] | {"clip_norm": 0.0},
    # A larger eps: AdamW divides by gradients near zero, and would compare rounding.
    "adamw": {"name": "adamw", "lr": 3e-3, "eps": 1e-4, "clip_norm": 0.0},
}


OTHERS = {
    name: {"name": name, "clip_norm": 0.0}
    for name in (
        "adopt",
        "lion",
        "ademamix",
        "mars",
        "decoupled_adamw",
        "decoupled_sgdw",
        "torch.NAdam",
    )
} | {
    name: {"name": name, "clip_norm": 0.0} for name in ("adafactor", "schedule_free", "torch.NAdam")
}


@pytest.mark.parametrize("optimizer", [*OPTIMIZERS, *OTHERS])
def test_the_optimizer_in_backward_makes_the_same_weights_to_the_bit(optimizer):
    groups = [{"match": "*.norm.weight", "lr": 0.01}]
    like = {
        "data": WHOLE,
        "optimizer": (OPTIMIZERS | OTHERS)[optimizer] | {"groups": groups},
        "schedule": {"name": "cosine", "warmup_steps": 3},
    }
    tied = like | {"model": BASE["model"] | {"tie_embeddings": True}}
    for plain in (like, tied):
        (after, inside) = run_ranks(1, few_steps, [plain, plain | {"memory": IN_BACKWARD}])[0]
        assert inside[0] == pytest.approx(after[0], rel=1e-6), "losses and norms"
        for name, weight in after[1].items():
            assert (inside[1][name] == weight).all(), name


@pytest.mark.parametrize("optimizer", quick(OPTIMIZERS, "sgd"))
def test_the_last_of_several_micro_batches_updates_weights(optimizer):
    """To the bit on one process, with a weight at both ends; under plans to rounding."""
    like = {"data": DATA | {"micro_batch": 2}, "optimizer": OPTIMIZERS[optimizer]}
    tied = like | {"model": BASE["model"] | {"tie_embeddings": True}}
    for plain in (like, tied):
        (after, inside) = run_ranks(1, few_steps, [plain, plain | {"memory": IN_BACKWARD}])[0]
        assert inside[0] == pytest.approx(after[0], rel=1e-6), "losses and norms"
        for name, weight in after[1].items():
            assert (inside[1][name] == weight).all(), name
    often = {"fsdp": {"reduce_every": "micro_batch"}}
    plans = [{"shard": 2}, {"shard": 2, **often}, {"tensor": 2}]
    changes = [like | {"memory": IN_BACKWARD, "parallel": plan} for plan in plans]
    assert_equal(2, changes, like)


@pytest.mark.parametrize("optimizer", quick(OPTIMIZERS, "sgd"))
def test_the_optimizer_in_backward_under_plans(optimizer):
    like = {"data": WHOLE, "optimizer": OPTIMIZERS[optimizer]}
    plans = [{"shard": 2}, {"tensor": 2}, {"context": 2, "fsdp": {"offload": True}}]
    changes = [like | {"memory": IN_BACKWARD, "parallel": plan} for plan in plans]
    assert_equal(2, changes, like)


@pytest.mark.matrix
def test_the_optimizer_in_backward_on_two_axes():
    """Norms and shared heads are whole on each tensor rank: their gradients come late."""
    like = {"data": WHOLE, "optimizer": OPTIMIZERS["sgd"]}
    hybrid = {"strategy": "hybrid_shard"}
    plans = [
        {"tensor": 2, "replicate": 2, "shard": 1},
        {"tensor": 4},
        {"tensor": 2, "shard": 2},
        {"replicate": 2, "shard": 2, "fsdp": hybrid},
    ]
    changes = [like | {"memory": IN_BACKWARD, "parallel": plan} for plan in plans]
    assert_equal(4, changes, like)


def test_gradients_do_not_meet_in_memory():
    """All but the largest gradient are gone when the last one is made."""
    wide = {"data": WHOLE | {"micro_batch": 1, "global_batch": 1}, "optimizer": OPTIMIZERS["sgd"]}
    wide["model"] = BASE["model"] | {"dim": 128, "n_layers": 6, "ffn_dim": 512}
    peaks, size = {}, 0
    for name, memory in {"after": {}, "in": IN_BACKWARD}.items():
        ((peaks[name], size),) = run_ranks(1, peak, recipe_with(memory=memory, **wide))
    assert peaks["after"] - peaks["in"] > 0.5 * size


def peak(recipe):
    parts = assembled(recipe)
    size = sum(weight.numel() * weight.element_size() for weight in parts.model.parameters())
    return track(
        parts.step, lambda batch, _: batch, recipe.data, recipe.model.layout.blocks, steps=2
    ).peak().total, size


def test_a_loop_that_forgets_the_rate_is_told():
    recipe = recipe_with(data=WHOLE, optimizer=OPTIMIZERS["sgd"], memory=IN_BACKWARD)
    assert "accumulate needs lr_factor" in run_ranks(1, forgetful, recipe)[0]


def forgetful(recipe):
    parts = assembled(recipe)
    batches = parts.loader.steps(0)
    parts.step.accumulate(next(batches), 1.0)
    with pytest.raises(ValueError, match="lr_factor") as error:
        parts.step.accumulate(next(batches))
    return str(error.value)


SETTINGS = ["memory.optimizer_in_backward=true"]
PLAIN = ["optimizer.clip_norm=0.0", "data.micro_batch=8"]


def test_checkpoints_are_the_same_with_and_without(tmp_path):
    """A run that changes its mind twice ends with the weights and moments of one that never did."""
    constant = [*PLAIN, "schedule.name=constant", "schedule.warmup_steps=0"]
    steady = write_recipe(tmp_path / "steady", steps=9)
    assert finish(start(steady, overrides=constant)) == [0]
    turning = write_recipe(tmp_path / "turning", steps=9)
    for steps, settings in ((3, SETTINGS), (6, []), (9, SETTINGS)):
        overrides = [*constant, *settings, f"run.steps={steps}"]
        assert finish(start(turning, overrides=overrides)) == [0], complaints(turning)
    (_, expected), (_, found) = tensors(tmp_path / "steady"), tensors(tmp_path / "turning")
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def poison_step_5():
    """Make the loss of the fifth step infinite: its gradients, and so all weights, become NaN."""
    original, count = TrainStep._forward_backward, [0]

    def poisoned(self, batches, factor, before_update):
        count[0] += 1
        worse = factor * (float("inf") if count[0] == 5 else 1.0)
        return original(self, batches, worse, before_update)

    TrainStep._forward_backward = poisoned


@pytest.mark.parametrize("policy", ["stop", "rollback"])
def test_a_bad_step_loses_nothing_that_was_saved(policy, tmp_path):
    """The weights are bad before anyone knows; no checkpoint ever holds them."""
    recipe = write_recipe(tmp_path / "run", steps=9)
    overrides = [*PLAIN, *SETTINGS, f"resilience.non_finite={policy}", "checkpoint.keep=9"]
    codes = finish(start(recipe, before=poison_step_5, overrides=overrides))
    assert codes == [6 if policy == "stop" else 0], complaints(recipe)
    step, state = tensors(tmp_path / "run")
    assert step == (3 if policy == "stop" else 9)
    assert all(value.isfinite().all() for value in state.values() if value.is_floating_point())
    if policy == "stop":
        assert finish(start(recipe, overrides=[*PLAIN, *SETTINGS])) == [0]
    losses = [row["loss"] for row in rows(tmp_path / "run")]
    assert len(losses) == 9
    assert max(losses) < 7
