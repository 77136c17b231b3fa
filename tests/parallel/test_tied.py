"""Sharded models compute what plain ones do, with one weight at both ends too."""

import pytest
import torch

from tests.cases import also
from tests.distributed import run_ranks
from tests.model_zoo.peers import SIZES
from trainer.engine.parallel.fsdp import apply_fsdp
from trainer.engine.parallel.materialize import materialize, without_storage
from trainer.engine.parallel.mesh import Degrees
from trainer.engine.parallel.plan import build_mesh
from trainer.engine.parallel.tables import Parallel
from trainer.kernels.choose import choose
from trainer.model_zoo.llama3.config import Llama3Config

CPU = torch.device("cpu")


def loss_and_gradients(world, tied, compute):
    """Return loss and gradients of the same batch on each rank, after an accumulated pass."""
    config = Llama3Config(**SIZES, tie_embeddings=tied, init_std=0.1)
    kernels = choose({}, "cpu", 16)
    with without_storage():
        model = config.build(kernels)
    model.compute_dtype = compute
    if world > 1:
        mesh = build_mesh(Degrees(shard=world), "cpu", sharded=True)
        apply_fsdp(model, config.layout, Parallel(), mesh, CPU, compute, torch.float32)
    materialize(model, CPU, seed=3)
    for step in range(2):
        x = torch.randint(0, 61, (2, 17), generator=torch.Generator().manual_seed(step))
        loss = model(x[:, :-1], labels=x[:, 1:], loss=kernels.linear_cross_entropy) / 32
        loss.backward()
    full = {
        name: (p.grad.full_tensor() if world > 1 else p.grad).numpy()
        for name, p in model.named_parameters()
    }
    return loss.item(), full


@pytest.mark.parametrize("tied", [True, *also(False)])
@pytest.mark.parametrize(
    ("compute", "tolerance"), [(torch.float32, 1e-5), *also((torch.bfloat16, 2e-2))]
)
def test_sharded_gradients_equal_those_of_one_process(tied, compute, tolerance):
    loss, gradients = loss_and_gradients(1, tied, compute)
    for their_loss, theirs in run_ranks(2, loss_and_gradients, 2, tied, compute):
        assert their_loss == pytest.approx(loss, rel=tolerance)
        assert theirs.keys() == gradients.keys()
        for name, gradient in gradients.items():
            difference = torch.from_numpy(theirs[name] - gradient).norm()
            assert difference < tolerance * torch.from_numpy(gradient).norm(), name
