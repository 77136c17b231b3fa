"""Command lines of torchrun, one a machine. Torch-free."""

from __future__ import annotations

import shlex
from collections.abc import Sequence


def torchrun_commands(
    nodes: int, processes: int, host: str, port: int, arguments: Sequence[str]
) -> list[str]:
    """Return what each machine runs, the first one first.

    Args:
        nodes: machines.
        processes: ranks on each.
        host: the first machine, as the others reach it.
        port: free there.
        arguments: of `trainer`.

    Source: torch.distributed.run.
    """
    words = ["torchrun", f"--nnodes={nodes}", f"--nproc-per-node={processes}"]
    run = ["--no-python", "trainer", *arguments]
    if nodes == 1:
        return [shlex.join([*words, "--standalone", *run])]
    meeting = [f"--master-addr={host}", f"--master-port={port}"]
    return [shlex.join([*words, f"--node-rank={node}", *meeting, *run]) for node in range(nodes)]
