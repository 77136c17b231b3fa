"""Training splits of different lengths and batches: as runs of their own, and under plans."""

import pytest
import torch

from tests.distributed import run_ranks
from tests.train.moe_family import moe_recipe
from tests.train.plans import BASE, by_one_process, curves, recipe_with
from trainer.engine.assemble.assemble import assemble
from trainer.engine.launch.environment import World

SOURCE = {"name": "synthetic", "num_documents": 300, "document_tokens": 20}
SPLITS = [
    {"name": "short", "sources": [SOURCE], "steps": 2},
    {
        "name": "long",
        "sources": [SOURCE | {"seed": 1}, SOURCE | {"seed": 2, "weight": 3.0}],
        "steps": 1,
        "seq_len": 64,
        "global_batch": 4,
        "micro_batch": 2,
    },
]
DATA = {key: value for key, value in BASE["data"].items() if key != "sources"}
DATA |= {"splits": SPLITS}
alone = by_one_process(curves)


@pytest.mark.parametrize(
    "parallel",
    [
        {"shard": 2},
        pytest.param({"context": 2}, marks=pytest.mark.matrix),
        pytest.param({"context": 2, "context_exchange": "ring"}, marks=pytest.mark.matrix),
        pytest.param({"tensor": 2}, marks=pytest.mark.matrix),
        pytest.param({"replicate": 2}, marks=pytest.mark.matrix),
    ],
    ids=str,
)
def test_losses_are_those_of_one_process(parallel):
    expected = alone(data=DATA)
    for found in run_ranks(2, curves, recipe_with(data=DATA, parallel=parallel)):
        for got, wanted in zip(found, expected, strict=True):
            assert got == pytest.approx(wanted, abs=1e-5, rel=1e-5)


def test_a_step_of_a_split_is_that_of_a_run_with_its_sizes():
    """Experts' losses are means over the sequences of a step, of which a split may have others."""
    sizes = {"seq_len": 64, "global_batch": 4, "micro_batch": 2}
    splits = [{"name": "a", "steps": 1, "sources": [SOURCE], **sizes}, {**SPLITS[0], "name": "b"}]
    found = []
    for data in ({"sources": [], "splits": splits}, {"sources": [SOURCE], **sizes}):
        torch.manual_seed(0)
        parts = assemble(moe_recipe(data=data), World(), torch.device("cpu"))
        gradients = parts.step.accumulate(next(parts.loader.steps(0)))
        found.append([gradients.loss.item(), gradients.total_loss.item(), gradients.norm.item()])
    assert found[0] == found[1]
    assert found[0][1] > found[0][0]
