"""Tensor, context and pipeline parallel plans give the curves and the weights of one process."""

from pathlib import Path

import pytest
import torch

from tests.cases import also
from tests.distributed import run_ranks
from tests.train.plans import (
    BASE,
    assembled,
    assert_same,
    assert_same_weights,
    recipe_with,
    weights,
    whole,
)
from trainer.engine.conversion.export import export_huggingface

# The time of these tests is that of collectives, as many in a micro batch of two rows as of one.
DATA = BASE["data"] | {"micro_batch": 2}
DOCUMENTS = DATA | {"packing": "documents"}
RING = {"context": 2, "context_exchange": "ring"}
QUICK = {
    "pipeline-2-ring-2": (4, {"pipeline": 2, **RING}),
    "pipeline-2-shard-2-tensor-2": (8, {"pipeline": 2, "tensor": 2, "shard": 2}),
}
MORE = {
    "tensor-4-shared-kv": (4, {"tensor": 4}),
    "context-2": (2, {"context": 2}),
    "tensor-2": (2, {"tensor": 2}),
    "pipeline-2": (2, {"pipeline": 2}),
    "ring-2": (2, RING),
    "tensor-2-shard-2": (4, {"tensor": 2, "shard": 2}),
    "context-2-tensor-2": (4, {"context": 2, "tensor": 2}),
    "tensor-2-replicate-2": (4, {"tensor": 2, "replicate": 2, "shard": 1}),
    "context-2-no_shard": (2, {"context": 2, "fsdp": {"strategy": "no_shard"}}),
    "context-4": (4, {"context": 4}),
    "ring-4": (4, {**RING, "context": 4}),
    "ring-2-shard-2": (4, {**RING, "shard": 2}),
    "ring-2-tensor-2": (4, {**RING, "tensor": 2}),
    "pipeline-2-replicate-2": (4, {"pipeline": 2, "replicate": 2, "shard": 1}),
    "pipeline-2-tensor-2": (4, {"pipeline": 2, "tensor": 2}),
    "pipeline-2-context-2": (4, {"pipeline": 2, "context": 2}),
    "context-2-tensor-2-hybrid": (
        8,
        {
            "context": 2,
            "tensor": 2,
            "replicate": 2,
            "shard": 1,
            "fsdp": {"strategy": "hybrid_shard"},
        },
    ),
}
PLANS = QUICK | MORE


@pytest.mark.parametrize("plan", [*QUICK, *also(*MORE)])
def test_plan_gives_the_curves_of_one_process(plan, alone):
    world, parallel = PLANS[plan]
    assert_same(world, alone, parallel=parallel, data=DOCUMENTS)


@pytest.mark.parametrize("schedule", ["Interleaved1F1B", *also("ZBVZeroBubble")])
def test_every_schedule_of_a_sharded_pipeline(schedule, alone):
    assert_same(
        4,
        alone,
        parallel={"pipeline": 2, "shard": 2, "pipelining": {"schedule": schedule}},
        model=BASE["model"] | {"n_layers": 5},
    )


@pytest.mark.matrix
@pytest.mark.parametrize("packing", ["none", "concat"])
@pytest.mark.parametrize("parallel", [RING, {"tensor": 2}, {"context": 2}, {"pipeline": 2}])
def test_every_packing_mode(parallel, packing, alone):
    assert_same(2, alone, parallel=parallel, data=BASE["data"] | {"packing": packing})


@pytest.mark.parametrize("attention", ["sdpa", *also("matmul")])
def test_either_kernel_in_a_ring(attention, alone):
    kernels = {"attention": attention}
    assert_same(2, alone, parallel=RING, data=DOCUMENTS, kernels=kernels)


@pytest.mark.parametrize(
    "parallel", [{"tensor": 2, "shard": 2}, *also({"pipeline": 2, "context": 2})]
)
def test_adamw(parallel, alone):
    assert_same(4, alone, parallel=parallel, data=DATA, optimizer={"name": "adamw", "lr": 3e-3})


def test_tied_embeddings_and_an_uneven_vocabulary(alone):
    """257 rows on two ranks."""
    model = BASE["model"] | {"tie_embeddings": True, "vocab_size": 257}
    assert_same(2, alone, parallel={"tensor": 2}, data=DATA, model=model)


def test_a_loss_that_needs_the_whole_vocabulary(alone):
    loss = {"name": "cross_entropy", "z_loss": 1e-2}
    assert_same(2, alone, parallel={"tensor": 2}, data=DATA, loss=loss)


@pytest.mark.matrix
@pytest.mark.parametrize("parallel", [RING, {"tensor": 2}, {"pipeline": 2}])
def test_recomputation(parallel, alone):
    assert_same(2, alone, parallel=parallel, memory={"recompute": "full"})


@pytest.mark.parametrize("others", [{}, *also(RING, {"shard": 2}, {"pipeline": 2}, {"context": 2})])
@pytest.mark.matrix
def test_compiled_blocks_change_no_weight(others):
    """Each weight is compared: a lost gradient may hardly show in the loss."""

    def eager(**_):
        return run_ranks(1, weights, recipe_with())[0]

    compiler = {"enabled": True, "backend": "aot_eager"}
    assert_same_weights(
        4 if others else 2, eager, parallel={"tensor": 2, **others}, compile=compiler
    )


def test_offloaded_weights_and_split_ones(alone):
    parallel = {"tensor": 2, "shard": 2, "fsdp": {"offload": True}}
    assert_same(4, alone, parallel=parallel, data=DATA)


@pytest.mark.parametrize("vocab_size", [257, *also(320)])
def test_logits_are_whole(vocab_size):
    model = BASE["model"] | {"vocab_size": vocab_size}
    found = run_ranks(2, logits, recipe_with(parallel={"tensor": 2}, model=model))
    (expected,) = run_ranks(1, logits, recipe_with(model=model))
    assert expected.shape == (2, 32, vocab_size)
    for each in found:
        torch.testing.assert_close(torch.from_numpy(each), torch.from_numpy(expected))


def logits(recipe):
    model = assembled(recipe).model
    with torch.no_grad():
        return model(torch.arange(64).view(2, 32)).numpy()


@pytest.mark.parametrize(
    "parallel", [{"pipeline": 2, "tensor": 2}, *also({"tensor": 2, "shard": 2})]
)
def test_weights_from_elsewhere_reach_every_rank(parallel, tmp_path):
    """A Hugging Face folder that one process writes."""
    expected = run_ranks(1, exported, recipe_with(), str(tmp_path / "hf"))[0]
    model = {**BASE["model"], "vocab_size": 320}
    changes = {"run": BASE["run"] | {"init_from": str(tmp_path / "hf"), "seed": 4}, "model": model}
    for part in run_ranks(4, initial, recipe_with(parallel=parallel, **changes)):
        assert part
        for name, weight in part.items():
            assert (weight == expected[name]).all(), name


def exported(recipe, folder):
    parts = assembled(recipe)
    export_huggingface(
        Path(folder), dict(parts.model.named_parameters()), parts.model_config, parts.tokenizer
    )
    return initial(recipe)


def initial(recipe):
    return whole(assembled(recipe).model)
