"""Clipping, loss scale, schedules, groups of parameters, averages, and early stopping."""

import torch
import torch.distributed as dist

from tests.known_bugs.catalogue import known_bug
from tests.known_bugs.ranks import alone, on_ranks
from tests.known_bugs.runs import (
    assembled,
    assert_equal,
    assert_same_gradients,
    gradients_of,
)
from trainer.engine.core.local import local
from trainer.engine.optim.tables import ParameterGroup, ScheduleConfig
from trainer.engine.train.average import WeightAverage
from trainer.engine.train.evaluate import validate
from trainer.engine.train.parts import Best
from trainer.engine.train.tables import Evaluate
from trainer.engine.train.update import UpdateAfterBackward


def scaled_gradients(clip_norm):
    """Return the norm that a step with a loss scale finds, and the gradients that it leaves."""
    parts = assembled(optimizer={"clip_norm": clip_norm})
    parts.step.scale.dynamic, parts.step.scale.value = True, 1024.0
    norm = parts.step.accumulate(next(parts.loader.steps(0))).norm
    return norm, gradients_of(parts)


def assert_the_scale_leaves_no_trace(clip_norm):
    plain = assembled(optimizer={"clip_norm": 0.0})
    expected = plain.step.accumulate(next(plain.loader.steps(0))).norm.item()
    norm, gradients = scaled_gradients(clip_norm)
    assert_equal(norm, expected, "norm")
    factor = min(1.0, clip_norm / expected)
    wanted = {name: gradient * factor for name, gradient in gradients_of(plain).items()}
    assert_same_gradients(gradients, wanted)


def clip_before_unscaling(patch):
    original = UpdateAfterBackward.finish

    def finish(self):
        self._scale.dynamic = False
        norm = original(self)
        self._scale.dynamic = True
        for group in self._optimizer.param_groups:
            for weight in group["params"]:
                weight.grad /= self._scale.value
        return norm / self._scale.value

    patch.setattr(UpdateAfterBackward, "finish", finish)


@known_bug(
    "rwth-i6/returnn#1595",
    "Gradients were clipped while they still had the loss scale, and became far too small.",
    clip_before_unscaling,
)
def gradients_lose_the_loss_scale_before_they_are_clipped():
    assert_the_scale_leaves_no_trace(clip_norm=0.5)


def change_the_scale_first(patch):
    original = UpdateAfterBackward.finish

    def finish(self):
        self._scale.value *= 2
        return original(self)

    patch.setattr(UpdateAfterBackward, "finish", finish)


@known_bug(
    "deepspeedai/DeepSpeed#8588",
    "In a step that raised the loss scale, gradients were divided by the new scale and not by"
    " that of their backward pass.",
    change_the_scale_first,
)
def gradients_are_divided_by_the_scale_of_their_backward_pass():
    assert_the_scale_leaves_no_trace(clip_norm=100.0)


STEPS = 6
DECAY = {"run": {"steps": STEPS}, "schedule": {"name": "linear", "warmup_steps": 2}}


def rates(changes):
    """Return the optimizer's learning rate in each step of a run."""
    parts = assembled(**DECAY, **changes)
    batches, found = parts.loader.steps(0), []
    for step in range(STEPS):
        factor = parts.schedule.lr_factor(step, parts.total_steps)
        parts.step.accumulate(next(batches), factor)
        parts.step.update(factor)
        parts.step.clear()
        found.append(parts.optimizer.param_groups[0]["lr"])
    return found


EXPECTED_RATES = [0.1 / 3, 0.2 / 3, 0.1, 0.075, 0.05, 0.025]
"""two steps of warmup to 0.1, then a line that reaches 0 when the run ends"""


def step_in_each_micro_batch(patch):
    original = ScheduleConfig.lr_factor
    patch.setattr(
        ScheduleConfig, "lr_factor", lambda self, step, total: original(self, step * 4, total)
    )


@known_bug(
    "starVLA/starVLA#210",
    "The schedule advanced in every micro batch, and learning rates fell as many times too fast.",
    step_in_each_micro_batch,
)
def the_schedule_advances_once_a_step():
    assert_equal(rates({}), EXPECTED_RATES)


def step_for_each_process(patch):
    original = ScheduleConfig.lr_factor

    def factor(self, step, total):
        return original(self, step * dist.get_world_size(), total)

    patch.setattr(ScheduleConfig, "lr_factor", factor)


@known_bug(
    "huggingface/accelerate#2926",
    "The schedule advanced once for each process in every step, and reached its end early.",
    step_for_each_process,
    world=2,
)
def the_schedule_does_not_know_the_number_of_ranks():
    for found in on_ranks(2, rates, {"parallel": {"replicate": 2, "shard": 1}}):
        assert_equal(found, EXPECTED_RATES)


def stretch_the_warmup(patch):
    original = ScheduleConfig.lr_factor

    def factor(self, step, total):
        longer = self.model_copy(update={"warmup_steps": self.warmup_steps * dist.get_world_size()})
        return original(longer, step, total)

    patch.setattr(ScheduleConfig, "lr_factor", factor)


@known_bug(
    "huggingface/diffusers#8312",
    "The warmup was multiplied by the number of processes, and the steps of the run were not.",
    stretch_the_warmup,
    world=2,
)
def the_warmup_does_not_grow_with_ranks():
    for found in on_ranks(2, rates, {"parallel": {"shard": 2}}):
        assert_equal(found, EXPECTED_RATES)


def forget_the_values_of_groups(patch):
    patch.setattr(ParameterGroup, "overrides", lambda self, config: {})


@known_bug(
    "ServiceNow/Fast-LLM#545",
    "A change to the code of norms dropped their exemption, and weight decay shrank them.",
    forget_the_values_of_groups,
)
def parameters_without_weight_decay_keep_their_values():
    groups = [{"match": "*norm.weight", "weight_decay": 0.0}]
    optimizer = {"name": "adamw", "lr": 0.1, "weight_decay": 0.5, "groups": groups}
    parts = assembled(optimizer=optimizer)
    before = {name: weight.detach().clone() for name, weight in parts.model.named_parameters()}
    for weight in parts.model.parameters():
        weight.grad = torch.zeros_like(weight)
    parts.step.update(1.0)
    for name, weight in parts.model.named_parameters():
        # Without a gradient AdamW does nothing but decay: w <- w - lr * decay * w.
        share = 1.0 if name.endswith("norm.weight") else 1 - 0.1 * 0.5
        assert_equal(weight, before[name] * share, name)


def decay_all_parameters_of_a_shard(patch):
    original = UpdateAfterBackward.apply

    def apply(self, *args):
        for group in self._optimizer.param_groups:
            group["weight_decay"] = 0.5
        original(self, *args)

    patch.setattr(UpdateAfterBackward, "apply", apply)


def decayed(changes):
    """Return what is left of each weight after a step without gradients."""
    groups = [{"match": "*norm.weight", "weight_decay": 0.0}]
    optimizer = {"name": "adamw", "lr": 0.1, "weight_decay": 0.5, "groups": groups}
    parts = assembled(optimizer=optimizer, **changes)
    named = dict(parts.model.named_parameters())
    before = {name: local(weight).clone() for name, weight in named.items()}
    for weight in named.values():
        weight.grad = torch.zeros_like(weight)
    parts.step.update(1.0)
    return {
        name: (local(weight).norm() / before[name].norm().clamp(min=1e-9)).item()
        for name, weight in named.items()
        if before[name].numel()
    }


@known_bug(
    "verl-project/verl#5070",
    "Sharded parameters were given to the optimizer as one group, and all of them decayed.",
    decay_all_parameters_of_a_shard,
    world=2,
)
def sharded_parameters_decay_by_their_names():
    for found in on_ranks(2, decayed, {"parallel": {"shard": 2}}):
        for name, share in found.items():
            assert_equal(share, 1.0 if name.endswith("norm.weight") else 0.95, name)


def after_an_evaluation_of_averages(changes):
    """Return the gradients of a step after an evaluation with averaged weights."""
    parts = assembled(
        data={"validation_fraction": 0.3},
        evaluate={"interval": 1, "steps": 1},
        ema={"decay": 0.9},
        **changes,
    )
    batches = parts.loader.steps(0)
    for step in range(2):
        parts.step.accumulate(next(batches))
        parts.step.update(1.0)
        parts.step.clear()
        parts.average.update(step + 1)
    loss = validate(parts)["loss"]
    parts.step.accumulate(next(batches))
    return {"loss": loss, "gradients": gradients_of(parts)}


def keep_gathered_weights(patch):
    @torch.no_grad()
    def swap(self):
        for weight, average in zip(self._weights.values(), self._averages.values(), strict=True):
            shard, average_shard = local(weight), local(average)
            copy = shard.clone()
            shard.copy_(average_shard)
            average_shard.copy_(copy)

    patch.setattr(WeightAverage, "_swap", swap)


@known_bug(
    "meta-pytorch/tnt#962",
    "Sharding still held gathered weights when averaged ones were swapped in and out, and"
    " computed with stale values.",
    keep_gathered_weights,
    world=2,
)
def training_continues_with_its_own_weights_after_averages_were_evaluated():
    parallel = {"shard": 2, "fsdp": {"strategy": "shard_grad_op"}}
    expected = alone(after_an_evaluation_of_averages, {})
    for found in on_ranks(2, after_an_evaluation_of_averages, {"parallel": parallel}):
        assert_equal(found["loss"], expected["loss"], "loss")
        assert_same_gradients(found["gradients"], expected["gradients"])


def never_reset_patience(patch):
    original = Best.update

    def update(self, table, step, values):
        before = self.bad
        is_best = original(self, table, step, values)
        self.bad = before + (not is_best)
        return is_best

    patch.setattr(Best, "update", update)


@known_bug(
    "modelscope/ms-swift#5326",
    "The counter of early stopping was not reset by a better evaluation, and runs ended too soon.",
    never_reset_patience,
)
def an_improvement_gives_back_all_patience():
    best, table = Best(), Evaluate(patience=2)
    for step, loss in enumerate([3.0, 3.5, 2.0, 2.5]):
        best.update(table, step, {"loss": loss})
    assert not best.is_exhausted(table)
    best.update(table, 5, {"loss": 2.5})
    assert best.is_exhausted(table)
