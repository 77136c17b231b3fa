"""Pipelines: two ranks with a stage each find what one process finds."""

import torch

from tests.known_bugs.catalogue import known_bug
from tests.known_bugs.ranks import alone, on_ranks
from tests.known_bugs.runs import (
    assembled,
    assert_equal,
    assert_first_step_as_alone,
    recipe_of,
    whole,
)
from trainer.engine.assemble.build import build_model
from trainer.engine.core.local import local
from trainer.engine.parallel import materialize
from trainer.engine.parallel.pipeline import pipeline, split
from trainer.engine.parallel.pipeline.cut import cut_blocks
from trainer.engine.parallel.pipeline.pipeline import Pipeline
from trainer.engine.parallel.tables import Pipelining
from trainer.engine.train import update

STAGES = {"pipeline": 2, "shard": 1, "pipelining": {"micro_batches": 2}}
TIED = {"tie_embeddings": True}


def leave_the_sum(patch):
    patch.setattr(Pipeline, "_scaled", lambda self, loss, target: loss.sum())


@known_bug(
    "pytorch/torchtitan#2972",
    "Stages ran their backward pass from the summed loss, and only the number in the log was"
    " divided by the tokens of the step.",
    leave_the_sum,
    world=2,
)
def gradients_of_a_pipeline_are_divided_by_the_labels_of_the_step():
    assert_first_step_as_alone(2, STAGES)


@known_bug(
    "pytorch/torchtitan#4194",
    "A second trainer of the same repository divided the loss of a pipeline by the labels of the"
    " step only after the schedule had run all backward passes.",
    leave_the_sum,
    world=2,
)
def every_schedule_divides_the_loss_before_its_backward_passes():
    for schedule in ("GPipe", "1F1B"):
        pipelining = {**STAGES["pipelining"], "schedule": schedule}
        assert_first_step_as_alone(2, {**STAGES, "pipelining": pipelining})


def let_the_schedule_scale(patch):
    original = pipeline.get_schedule_class

    def find(name):
        kind = original(name)

        def init(self, *args, **options):
            kind.__init__(self, *args, **{**options, "scale_grads": True})

        return type(kind.__name__, (kind,), {"__init__": init})

    patch.setattr(pipeline, "get_schedule_class", find)


@known_bug(
    "pytorch/torchtitan#1733",
    "The schedule divided all gradients by its micro batches at the end of each run, those that"
    " had been accumulated before too.",
    let_the_schedule_scale,
    world=2,
)
def the_schedule_divides_no_gradients():
    assert_first_step_as_alone(2, STAGES)


def divide_by_micro_batches(patch):
    original = Pipeline._scaled

    def scaled(self, loss, target):
        return original(self, loss, target) / self.micro_batches

    patch.setattr(Pipeline, "_scaled", scaled)


@known_bug(
    "areal-project/AReaL#1273",
    "A loss that was weighted over the whole step was divided by the pipeline's micro batches"
    " once more.",
    divide_by_micro_batches,
    world=2,
)
def the_number_of_micro_batches_does_not_change_gradients():
    for micro_batches in (2, 4):
        parallel = {**STAGES, "pipelining": {"micro_batches": micro_batches}}
        assert_first_step_as_alone(2, parallel)


def norm_of_own_stage(patch):
    def global_norm(gradients, num_holders, device):
        return torch.nn.utils.get_total_norm([part for _, part in gradients])

    patch.setattr(update, "global_norm", global_norm)


@known_bug(
    "pytorch/torchtitan#596",
    "Each stage clipped by the norm of its own gradients instead of the norm over all stages.",
    norm_of_own_stage,
    world=2,
)
def the_norm_counts_the_gradients_of_all_stages():
    assert_first_step_as_alone(2, STAGES)


def forget_the_other_end(patch):
    patch.setattr(split, "make_tied_reduction", lambda *args: lambda: None)


@known_bug(
    "NVIDIA/Megatron-LM#656",
    "The embedding and the head that share a weight were on two stages, and became two weights.",
    forget_the_other_end,
    world=2,
)
def a_tied_weight_has_the_gradient_of_both_ends():
    assert_first_step_as_alone(2, STAGES, model=TIED)


def count_both_ends(patch):
    original = split.PipelineParallel.wrap

    def wrap(self, *args):
        wrapped = original(self, *args)
        object.__setattr__(wrapped, "duplicate_parameters", ())
        return wrapped

    patch.setattr(split.PipelineParallel, "wrap", wrap)


@known_bug(
    "NVIDIA/Megatron-LM#7227",
    "A weight that two stages share entered the gradient norm twice.",
    count_both_ends,
    world=2,
)
def a_tied_weight_counts_once_in_the_norm():
    assert_first_step_as_alone(2, STAGES, model=TIED)


def exchange_other_shards(patch):
    original = split.make_tied_reduction

    def make(other, parameters, group, device):
        reduce_gradients = original(other, parameters, group, device)

        def reduce_and_mix():
            own = [local(weight.grad).clone() for weight in parameters]
            reduce_gradients()
            for weight, mine in zip(parameters, own, strict=True):
                theirs = local(weight.grad) - mine
                local(weight.grad).copy_(mine + theirs.flip(0))

        return reduce_and_mix

    patch.setattr(split, "make_tied_reduction", make)


@known_bug(
    "NVIDIA/Megatron-LM#844",
    "The two ends of a tied embedding exchanged shards that did not belong together, and added up"
    " partial sums.",
    exchange_other_shards,
    world=4,
)
def tied_weights_add_the_sums_of_all_data_ranks():
    parallel = {**STAGES, "shard": 2}
    assert_first_step_as_alone(4, parallel, model=TIED)


def initial_weights(changes):
    """Return the initial weights that this rank has."""
    parts = assembled(**changes)
    return {name: whole(weight) for name, weight in parts.model.named_parameters()}


def number_blocks_by_stage(patch):
    original = split.prune

    def prune(model, layout, cut, rank):
        original(model, layout, cut, rank)
        blocks = model.get_submodule(layout.blocks)
        own = list(blocks._modules.values())
        blocks._modules.clear()
        blocks._modules.update({str(number): block for number, block in enumerate(own)})

    patch.setattr(split, "prune", prune)


@known_bug(
    "NVIDIA/Megatron-LM#7452",
    "Stages saved their blocks under numbers of their own, so that a checkpoint read with another"
    " number of stages gave blocks the weights of others.",
    number_blocks_by_stage,
)
def blocks_of_a_stage_keep_their_numbers():
    recipe = recipe_of(model={"n_layers": 4})
    config = recipe.model.with_vocab(257)
    cut = cut_blocks(Pipelining(), 2, config, None)
    model = build_model(recipe, 257, torch.device("cpu")).model
    every = {name for name, _ in model.named_parameters()}
    split.prune(model, config.layout, cut, 1)
    own = {name for name, _ in model.named_parameters()}
    assert own | model.remote_parameters.keys() == every
    assert own.isdisjoint(model.remote_parameters)
    found = {int(name.split(".")[1]) for name in own if name.startswith("layers.")}
    assert found == {number for stage in cut.stages_of(1) for number in cut.blocks(stage)}


def draw_by_place(patch):
    """Draw initial weights one after the other instead of by name."""
    original, drawn = materialize._normal, []

    def normal(key, count):
        drawn.append(key)
        return original(str(len(drawn)), count)

    patch.setattr(materialize, "_normal", normal)


@known_bug(
    "Modalities/modalities#426",
    "All stages drew initial weights from the same stream of random numbers, so that blocks of"
    " different stages started equal.",
    draw_by_place,
    world=2,
)
def stages_start_with_the_weights_of_one_process():
    expected = alone(initial_weights, {})
    for found in on_ranks(2, initial_weights, {"parallel": STAGES}):
        for name, weight in found.items():
            assert_equal(weight, expected[name], name)
