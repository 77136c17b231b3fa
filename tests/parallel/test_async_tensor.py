"""Collectives of tensor parallelism are fused with products, and the curves stay."""

import os
from collections import Counter
from unittest.mock import patch

import pytest
import torch
import torch._dynamo

from tests.cases import also
from tests.distributed import run_ranks
from tests.train.plans import BASE, assembled, recipe_with
from trainer.engine.core.errors import EnvironmentFault

GENERATES_CODE = pytest.mark.skipif(
    not os.environ.get("TRAINER_SLOW"), reason="a minute of C++ compilation: set TRAINER_SLOW=1"
)
STEPS = 2
MODEL = BASE["model"] | {"n_layers": 1}
ASYNC = {"parallel": {"tensor": 2, "async_tensor": True}, "compile": {"enabled": True}}
FUSED = ("fused_all_gather_matmul", "fused_matmul_reduce_scatter")


def losses_and_norms(recipe):
    parts = assembled(recipe)
    batches, found = parts.loader.steps(0), []
    for _ in range(STEPS):
        gradients = parts.step.accumulate(next(batches))
        parts.step.update(1.0)
        parts.step.clear()
        found += [gradients.loss.item(), gradients.norm.item()]
    return found


def without_code(graph, example_inputs):
    """Run inductor's pass over the graphs of forward and backward, and interpret what it made."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor import config
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.fx_passes.micro_pipeline_tp import micro_pipeline_tp_pass
    from torch._inductor.fx_passes.post_grad import view_to_reshape

    def compile_graph(module, _inputs):
        assert config._micro_pipeline_tp
        view_to_reshape(module)
        micro_pipeline_tp_pass(module.graph)
        module.recompile()
        return make_boxed_func(module.forward)

    return aot_autograd(
        fw_compiler=compile_graph,
        decompositions=select_decomp_table(),
        partition_fn=min_cut_rematerialization_partition,
    )(graph, example_inputs)


def fused(recipe, folder):
    """Return losses and norms, and how often each fused operation was called: torch's fallbacks,
    which compute on a CPU what symmetric memory does on GPUs.
    """
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    from torch.distributed import _symmetric_memory as memory

    calls = Counter()

    def counted(name):
        fallback = getattr(memory, f"_{name}_fallback")

        def call(*args, **kwargs):
            calls[name] += 1
            return fallback(*args, **kwargs)

        return call

    if recipe.compile.backend == without_code.__name__:
        torch._dynamo.register_backend(without_code)
    library = torch.library.Library("symm_mem", "IMPL")
    for name in FUSED:
        library.impl(name, counted(name), "CPU")
    with (
        patch("trainer.engine.parallel.collectives.SYMMETRIC_MEMORY_DEVICES", ("cpu",)),
        patch("torch.distributed.is_nccl_available", lambda: True),  # the pass asks for it
        memory._test_mode(),
    ):
        return losses_and_norms(recipe), dict(calls)


@pytest.mark.parametrize(
    ("rows", "backend"),
    [
        (1, without_code.__name__),
        *also((2, without_code.__name__)),
        pytest.param(2, "inductor", marks=GENERATES_CODE),
    ],
)
def test_every_collective_of_a_block_is_fused_and_the_losses_stay(rows, backend, tmp_path):
    changes = {"model": MODEL, "data": BASE["data"] | {"micro_batch": rows}}
    (expected,) = run_ranks(1, losses_and_norms, recipe_with(**changes))
    changes |= ASYNC | {"compile": {"enabled": True, "backend": backend}}
    micro_batches = STEPS * BASE["data"]["global_batch"] // rows
    # Attention and feed-forward layer each gather once, and reduce once; backward gathers for that.
    wanted = dict(zip(FUSED, (4 * micro_batches, 2 * micro_batches), strict=True))
    for found, calls in run_ranks(2, fused, recipe_with(**changes), str(tmp_path), timeout=280):
        assert found == pytest.approx(expected, abs=1e-5, rel=1e-5)
        assert calls == wanted


def refusal(recipe):
    with pytest.raises(EnvironmentFault) as caught:
        assembled(recipe)
    return caught.value.message, caught.value.hint


def test_a_run_without_gpus_is_refused():
    for message, hint in run_ranks(2, refusal, recipe_with(**ASYNC)):
        assert message == "parallel.async_tensor needs GPUs, and this rank computes on cpu"
        assert hint == "set parallel.async_tensor = false"
