"""Further predictions that a task does not train are kept, and every other weight is trained."""

import pytest
import torch

from tests.cases import also
from tests.cells.draw import Cell
from tests.cells.run import compare
from trainer.engine.check.adapt import adapt
from trainer.engine.check.check_plan import check_plan
from trainer.engine.check.jobs import PlanJob
from trainer.engine.check.rank import run_job
from trainer.engine.check.workers import RankPool
from trainer.engine.estimate.step_sizes import StepSizes
from trainer.engine.recipe.checks.checks import check
from trainer.engine.recipe.schema import Recipe
from trainer.engine.train.step import TrainStep
from trainer.model_zoo.deepseek_v3.config import DeepSeekV3Config

MODEL = {
    "name": "deepseek_v3",
    "dim": 32,
    "n_layers": 3,
    "n_heads": 4,
    "ffn_dim": 32,
    "kv_lora_rank": 8,
    "rope_head_dim": 4,
    "nope_head_dim": 4,
    "value_head_dim": 4,
    "vocab_size": 320,
    "mtp_depth": 1,
    "moe": {"num_experts": 4, "expert_ffn_dim": 8, "aux_weight": 0.01, "aux_scope": "global"},
}
WITHOUT = {**MODEL, "mtp_depth": 0}
LABELS = {"labels": ["a", "b"]}
TASKS = {
    "preference": {},
    "language_modeling": {},
    "masked_language_modeling": {},
    "distillation": {"teacher": "random weights"},
    "sequence_classification": LABELS,
    "token_classification": LABELS,
    "question_answering": {},
    "reward": {},
}
READS_DOCUMENTS = ("language_modeling", "masked_language_modeling", "distillation")
FURTHER = "layers.3."


def recipe_of(task, world=1, **changes):
    """Return a valid recipe of a task that trains a model of further predictions."""
    model = MODEL
    if task == "masked_language_modeling":  # with `mtp_depth` bidirectional attention is refused
        model = {**WITHOUT, "attention": "bidirectional"}
    source = {"name": "synthetic"} if task in READS_DOCUMENTS else {"name": "jsonl", "path": "x"}
    recipe = Recipe.model_validate(
        {
            "run": {"steps": 2, "name": "further"},
            "task": {"name": task, **TASKS[task]},
            "model": model,
            "data": {"seq_len": 64, "global_batch": 4, "micro_batch": 1, "sources": [source]},
        }
        | changes
    )
    assert not check(recipe, world)
    return recipe


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run a step of a recipe; return names with a gradient, and the state before and after it."""

    def run(recipe):
        seen = {}

        def clear(step):
            model = step.parallel_model.model
            named = dict(model.named_parameters())
            seen["trained"] = {name for name, weight in named.items() if weight.requires_grad}
            seen["reached"] = {name for name, weight in named.items() if weight.grad is not None}
            seen["after"] = model.state_dict()

        def accumulate(step, *batches):
            state = step.parallel_model.model.state_dict()
            seen["before"] = {name: value.clone() for name, value in state.items()}
            return original(step, *batches)

        original = TrainStep.accumulate
        monkeypatch.setattr(TrainStep, "accumulate", accumulate)
        monkeypatch.setattr(TrainStep, "clear", clear)
        job = PlanJob(adapt(recipe, tmp_path, as_is=True)[0], str(tmp_path / "x.npz"), True, 1)
        threads = torch.get_num_threads()
        run_job(0, 1, lambda word: None, job)
        torch.set_num_threads(threads)
        return seen

    return run


@pytest.mark.parametrize("task", TASKS)
def test_every_weight_of_a_task_gets_a_gradient_or_is_frozen(task, run):
    seen = run(recipe_of(task))
    assert seen["reached"] == seen["trained"]
    frozen = seen["before"].keys() - seen["trained"]
    frozen = {name for name in frozen if not name.endswith(("router.bias", "router.load"))}
    assert all(name.startswith(FURTHER) for name in frozen)
    assert bool(frozen) == (task == "preference")


@pytest.mark.parametrize("lora", [{}, {"rank": 2}])
def test_preferences_leave_further_predictions_as_they_were_loaded(lora, run):
    seen = run(recipe_of("preference", lora=lora))
    further = [name for name in seen["before"] if name.startswith(FURTHER)]
    assert f"{FURTHER}mlp.router.load" in further
    assert f"{FURTHER}attention.o.weight.lora_down" not in further
    assert seen["reached"] == seen["trained"]
    for name in further:
        assert torch.equal(seen["before"][name], seen["after"][name]), name
    assert any(
        not torch.equal(seen["before"][name], seen["after"][name]) for name in seen["trained"]
    )


def test_a_model_whose_further_predictions_are_frozen_costs_what_one_without_them_does():
    config = DeepSeekV3Config(**MODEL)
    frozen = config.freeze_predictions().with_vocab(320)
    without = config.model_copy(update={"mtp_depth": 0})
    assert frozen.parameter_shapes() == config.parameter_shapes() != without.parameter_shapes()
    assert frozen.flops_per_token(64) == without.flops_per_token(64) < config.flops_per_token(64)
    assert frozen.head_cost == without.head_cost < config.head_cost
    assert (frozen.num_blocks, frozen.trained_blocks) == (4, 3)
    sizes = [StepSizes.of(recipe_of("preference", model=model)) for model in (MODEL, WITHOUT)]
    for name in ("dense", "routed", "head", "attention", "expert_blocks"):
        assert getattr(sizes[0], name) == getattr(sizes[1], name), name
    assert sizes[0].ends == sizes[1].ends


BF16 = {"precision": {"compute": "bf16"}}
PLANS = {
    "replicate": (2, {"replicate": 2}, {}),
    # Gradients are held back until the last micro batch, and in bf16 FSDP looks for them.
    "shard": (2, {"shard": 2, "fsdp": {"prefetch": 2}}, BF16),
    "pipeline and shard": (4, {"pipeline": 2, "shard": 2}, BF16),
    "pipeline and shard, reduced": (
        4,
        {"pipeline": 2, "shard": 2, "fsdp": {"reduce_every": "micro_batch"}},
        BF16,
    ),
    # Only trained predictions use the tied embedding more than once in the last stage.
    "tied": (
        2,
        {"pipeline": 2, "pipelining": {"schedule": "ZBVZeroBubble"}},
        {"model": {**MODEL, "n_layers": 4, "tie_embeddings": True}},
    ),
    "adapters": (4, {"pipeline": 2, "shard": 2}, {"lora": {"rank": 2}}),
    "adapters beside replicas": (2, {"replicate": 2}, {"lora": {"rank": 2}}),
    "experts": (4, {"shard": 4, "expert": 2}, {"loss": {"name": "kto"}}),
}


@pytest.mark.parametrize("name", also(*PLANS))
def test_plans_of_preferences_equal_one_process(name):
    world, parallel, changes = PLANS[name]
    recipe = recipe_of("preference", world, parallel=parallel, **changes)
    with RankPool(300.0) as pool:
        if changes == BF16:
            assert check_plan(recipe, world, pool, as_is=True).difference is None
        else:
            assert compare(Cell(1, recipe, world, {}), pool) == ""
