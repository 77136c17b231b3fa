"""Gloo groups of a job whose default process group has only a part of the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
from torch.distributed import ProcessGroup, ProcessGroupGloo

from ...kernels.torch_private import PrefixStore, Store


def create_job_group(store: Store, rank: int, size: int, timeout_seconds: float) -> ProcessGroup:
    """Create a gloo group that does not know the default process group.

    `torch.distributed.new_group` takes only ranks of the default group. Collectives of
    `torch.distributed` take this group too, with `group_src` and `group_dst`.

    Args:
        store: a store that only the ranks of the group use.
        rank: number of this process in the group.
        size: number of processes in the group.
        timeout_seconds: how long a collective waits for the other ranks.
    """
    timeout = timedelta(seconds=timeout_seconds)
    group = ProcessGroup(store, rank, size)
    group._set_default_backend(ProcessGroup.BackendType.GLOO)
    backend = ProcessGroupGloo(store, rank, size, timeout)
    group._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, backend)
    return group


def create_subgroup(
    job: ProcessGroup, name: str, ranks: Sequence[int], timeout_seconds: float
) -> ProcessGroup:
    """Create a group of some ranks of a job; just these ranks call it.

    Args:
        job: what `create_job_group` returned, for all ranks.
        name: a name that no other group of the job has.
        ranks: numbers of the ranks in the job, this one among them.
        timeout_seconds: how long a collective waits for the other ranks.
    """
    store = PrefixStore(name, job.get_group_store())
    return create_job_group(store, ranks.index(job.rank()), len(ranks), timeout_seconds)
