"""Jobs of ranks with a mistake put in, which check-plan must find."""

from unittest.mock import patch

import torch
import torch.distributed as dist

from trainer.engine.check.rank import run_job
from trainer.engine.parallel.tensor import tensor
from trainer.engine.train.balance import Balance
from trainer.engine.train.step import TrainStep

STEP = TrainStep.accumulate


def forget_replicated(rank, ranks, report, job):
    """Tensor ranks do not sum the gradients of parameters that all of them hold."""
    with patch.object(tensor, "make_replicated_reduction", lambda *_: lambda: None):
        return run_job(rank, ranks, report, job)


def _scaled(part, axis, factor):
    """Return a job that scales the gradients of some parameters where an axis has ranks."""

    def accumulate(step, *args):
        found = STEP(step, *args)
        for name, weight in step.parallel_model.model.named_parameters():
            if part in name and getattr(step.degrees, axis) > 1:
                weight.grad.mul_(factor)
        return found

    def job(rank, ranks, report, job):
        with patch.object(TrainStep, "accumulate", accumulate):
            return run_job(rank, ranks, report, job)

    return job


count_experts_twice = _scaled("mlp.experts.down", "expert", 2.0)
scale_a_norm = _scaled("layers.1.mlp.norm", "pipeline", 1.0 + 1e-7)


def route_otherwise(rank, ranks, report, job):
    """Ranks of the shard axis add a number to the first expert's score."""
    start = Balance.start

    def tilt(self, *args):
        start(self, *args)
        if ranks > 1:
            for layer in self._layers:
                layer.router.weight.data[0].add_(1.0)

    with patch.object(Balance, "start", tilt):
        return run_job(rank, ranks, report, job)


def wait_for_each_other(rank, ranks, report, job):
    """Two ranks wait for a message that neither sends."""
    if ranks > 1:
        report("an exchange")
        dist.recv(torch.zeros(1), 1 - rank)
    return run_job(rank, ranks, report, job)


def fail(rank, ranks, report, job):
    """The last rank fails while the others wait for it."""
    report("a phase")
    if ranks > 1 and rank == ranks - 1:
        raise ValueError("it is the last rank")
    if ranks > 1:
        dist.barrier()
    return run_job(rank, ranks, report, job)
