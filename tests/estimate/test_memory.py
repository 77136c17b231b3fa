"""The estimated peak is what a real step of the same recipe counts."""

import os

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from tests.cases import quick
from tests.distributed import run_ranks
from trainer.engine.assemble.build import build_model, build_step
from trainer.engine.estimate.simulate.build import empty_batches
from trainer.engine.estimate.simulate.extrapolate import simulate_memory
from trainer.engine.estimate.simulate.instrumented import track
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
EXPERTS = {
    "name": "qwen3",
    **{key: value for key, value in BASE["model"].items() if key != "ffn_dim"},
    "moe": {"num_experts": 8, "expert_ffn_dim": 128, "force_balanced": True, "aux_weight": 0.01},
}
SHORTER = BASE["data"] | {"global_batch": 4}  # two micro batches on a rank
PREDICTIONS = {
    "name": "deepseek_v3",
    "dim": 32,
    "n_layers": 4,
    "n_heads": 2,
    "ffn_dim": 64,
    "q_lora_rank": 12,
    "kv_lora_rank": 10,
    "nope_head_dim": 12,
    "rope_head_dim": 4,
    "value_head_dim": 10,
    "n_dense_layers": 3,
    "moe": {"num_experts": 4, "expert_ffn_dim": 16, "force_balanced": True},
}
PLANS = {
    "alone": (1, {}, {"data": SHORTER}),
    "shard": (2, {"shard": 2}, {}),
    "tensor": (2, {"tensor": 2}, {"data": SHORTER}),
    "context": (2, {"context": 2}, {}),
    "ring": (4, {"context": 4, "context_exchange": "ring"}, {}),
    "pipeline": (2, {"pipeline": 2}, {}),
    "shard-tensor": (4, {"shard": 2, "tensor": 2}, {}),
    "hybrid": (4, {"replicate": 2, "shard": 2}, {"memory": {"recompute": "full"}}),
    "context-shard": (4, {"shard": 2, "context": 2}, {"memory": {"recompute": "selective"}}),
    "pipeline-shard": (
        4,
        {"pipeline": 2, "shard": 2, "pipelining": {"schedule": "ZBVZeroBubble"}},
        {},
    ),
    "1F1B": (4, {"pipeline": 4}, {}),
    "offload": (2, {"shard": 2, "fsdp": {"offload": True}}, {"ema": {"decay": 0.9}}),
    "adapters": (2, {"shard": 2}, {"lora": {"rank": 4}}),
    "expert": (2, {"expert": 2}, {"model": EXPERTS | {"n_layers": 2}}),
    "expert-shard": (4, {"expert": 2}, {"model": EXPERTS, "memory": {"recompute": "full"}}),
    "expert-divided": (
        4,
        {"expert": 2, "expert_tensor": 2, "tensor": 2},
        {"model": EXPERTS},
    ),
    "sinks": (
        4,
        {"expert": 2, "tensor": 2, "context": 2, "context_exchange": "ring"},
        {"model": EXPERTS | {"name": "gpt_oss", "n_layers": 2, "window": 20}},
    ),
    "predictions": (2, {"pipeline": 2}, {"model": PREDICTIONS | {"mtp_depth": 1}}),
    "two predictions": (2, {"pipeline": 2}, {"model": PREDICTIONS | {"mtp_depth": 2}}),
    "frozen predictions": (
        2,
        {"pipeline": 2},
        {
            "model": PREDICTIONS | {"mtp_depth": 1},
            "task": {"name": "preference"},
            "loss": {"name": "simpo"},
            "data": BASE["data"] | {"packing": "none"},
        },
    ),
    "pairs": (
        4,
        {"shard": 4, "fsdp": {"reshard_after_forward": 2, "ignored": ["*.up.weight", "embed.*"]}},
        {"model": BASE["model"] | {"n_layers": 2}},
    ),
    "bf16": (
        2,
        {"shard": 2, "fsdp": {"ignored": ["*.up.weight"]}},
        {"precision": {"compute": "bf16", "parameters": "bf16"}},
    ),
    "float8": (
        2,
        {"shard": 2},
        {"precision": {"compute": "bf16", "float8": {"enabled": True, "emulate": True}}},
    ),
}
IN_EVERY_RUN = "alone", "expert"


def built_step(recipe):
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    plan = make_plan(recipe.parallel, rank, ranks, CPU)
    built = build_model(recipe, VOCAB, CPU, plan)
    materialize(built.model, CPU, 0)
    return build_step(recipe, built, plan), plan


def counted(recipe):
    """Return the peak of this rank's real steps: the second one has an optimizer state."""
    step, plan = built_step(recipe)
    blocks = recipe.model.layout.blocks
    return track(step, plan.take, recipe.data, blocks, ema=recipe.ema, steps=2).peak().total


def simulated(recipe, rank, ranks):
    found = simulate_memory(recipe, rank, ranks, VOCAB)
    assert sum(found.at_peak.values()) == found.peak_bytes
    return found.peak_bytes


@pytest.mark.parametrize("plan", quick(PLANS, *IN_EVERY_RUN))
def test_the_estimate_is_what_real_steps_count(plan):
    if plan == "float8":
        pytest.importorskip("torchao")
    ranks, parallel, others = PLANS[plan]
    recipe = Recipe.model_validate(BASE | {"parallel": parallel} | others)
    for rank, expected in enumerate(run_ranks(ranks, counted, recipe, timeout=900)):
        (found,) = run_ranks(1, simulated, recipe, rank, ranks, timeout=900)
        assert found == pytest.approx(expected, rel=0.01)


def test_monitors_that_copy_weights_are_counted():
    few = {"seq_len": 8, "global_batch": 1, "micro_batch": 1}
    updates = {"name": "histograms", "match": "layers.3.*", "of": ["updates"]}
    monitors = [{"name": "norms"}, updates]
    recipe = Recipe.model_validate(
        BASE
        | {
            "data": BASE["data"] | few,
            "optimizer": {"name": "sgd"},
            "precision": {"compute": "fp32"},
        }
        | {"metrics": {"monitors": monitors}}
    )
    found = simulate_memory(recipe, 0, 1, VOCAB)
    step, plan = built_step(recipe)
    weights = dict(step.parallel_model.model.named_parameters())
    last = [weight.nbytes for name, weight in weights.items() if name.startswith("layers.3.")]
    copies = sum(weight.nbytes for weight in weights.values()) + sum(last)
    assert found.at_peak["monitors"] == pytest.approx(copies, rel=0.02)
    real = track(step, plan.take, recipe.data, recipe.model.layout.blocks, steps=2).peak().total
    assert found.peak_bytes == pytest.approx(real, rel=0.01)


def recorded(recipe):
    """Return the peak of a real step as the CPU's allocator tells torch's profiler."""
    step, _ = built_step(recipe)
    share = recipe.data.global_batch // step.degrees.data
    batches = empty_batches(step.task, share, recipe.data.micro_batch)
    for _ in range(2):  # DDP makes its buckets anew in the second
        step.accumulate(batches)
        step.update(1.0)
        step.clear()
    model = step.parallel_model.model
    state = [value for held in step.optimizer.state.values() for value in held.values()]
    tensors = [*model.parameters(), *model.buffers(), *state]
    if step.degrees.data > 1:  # DDP's buckets, whose views the gradients are, stay
        tensors += [weight for weight in model.parameters() if weight.requires_grad]
    for batch in batches:
        columns = batch.tokens, batch.labels, batch.positions, batch.document_ids
        tensors += [column for column in columns if column is not None]
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recording:
        step.accumulate(batches)
        step.update(1.0)
        step.clear()
    events = [e for e in recording.profiler.kineto_results.events() if e.name() == "[memory]"]
    total = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        total += event.nbytes()
        peak = max(peak, total)
    return sum(tensor.nbytes for tensor in tensors) + peak, len(events)


@pytest.mark.matrix
@pytest.mark.parametrize(("recompute", "copies"), [("none", 2), ("none", 1), ("full", 1)])
def test_the_allocator_records_the_same_peak(recompute, copies):
    """Under DDP too, which makes its buckets where no operation is seen."""
    model = BASE["model"] | {"dim": 256, "ffn_dim": 768}
    parallel = {"replicate": copies, "shard": 1}
    changes = {"model": model, "memory": {"recompute": recompute}, "parallel": parallel}
    recipe = Recipe.model_validate(BASE | changes | {"precision": {"compute": "fp32"}})
    for rank, (peak, events) in enumerate(run_ranks(copies, recorded, recipe, timeout=900)):
        (found,) = run_ranks(1, simulated, recipe, rank, copies, timeout=900)
        assert events > 1000
        assert found == pytest.approx(peak, rel=0.03)
