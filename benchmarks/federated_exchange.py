"""Exchange and outer step of a round over torchrun, beside gloo's all-reduce of the same bytes.

Both take turns on the same ranks (gloo, one thread each), on the same tensors. Bytes are those
that the kernel counts for the sockets of each rank (TCP_INFO), beside the carrier's formula.

    python benchmarks/federated_exchange.py --write
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import struct
import tempfile
import time
from pathlib import Path
from typing import Any

import results
import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from trainer.engine.federated.carriers.exchange import average_in_order
from trainer.engine.federated.server.optimizers import FedNesterov
from trainer.engine.launch.job_group import create_job_group
from trainer.kernels.torch_private import FileStore

SHAPES = {f"layers.{index}": (1024, 1024) for index in range(8)} | {"embedding": (8192, 1024)}
BYTES = 4 * sum(rows * columns for rows, columns in SHAPES.values())
ACKED, RECEIVED = 120, 128
"""offsets of tcpi_bytes_acked and tcpi_bytes_received in Linux's struct tcp_info"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, action="append", help="default: 2 and 4")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--write", action="store_true", help=f"append to {results.FOLDER.name}/")
    options = parser.parse_args()
    rows = [measure(clients, options.rounds) for clients in options.clients or (2, 4)]
    for row in rows:
        print(json.dumps(row))
    if options.write:
        measured = {"bytes": BYTES, "rounds": options.rounds, "rows": rows}
        print(f"written to {results.append('federated_exchange', measured).name}")


def measure(clients: int, rounds: int) -> dict[str, Any]:
    """Return seconds of both, and bytes that a client sends and receives in a round."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(measure_client, (clients, folder, rounds), nprocs=clients)
        found = [json.loads((Path(folder) / f"{each}.json").read_text()) for each in range(clients)]
    # A round ends with its slowest client.
    seconds = {
        key: statistics.median(map(max, zip(*(each[key] for each in found), strict=True)))
        for key in ("exchange", "all_reduce")
    }
    ledger = 2 * (clients - 1) * BYTES // clients
    counted = {key: max(each[key] for each in found) for key in ("sent", "received")}
    ratios = {f"{key}_ratio": count / ledger for key, count in counted.items()}
    ratio = seconds["exchange"] / seconds["all_reduce"]
    return {"clients": clients, **seconds, "ratio": ratio, "ledger": ledger, **counted, **ratios}


def measure_client(client: int, clients: int, folder: str, rounds: int) -> None:
    """Measure one client, and write what it found."""
    torch.set_num_threads(1)
    torch.manual_seed(client)
    group = create_job_group(FileStore(f"{folder}/store", clients), client, clients, 300)
    gradient = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    weights = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    optimizer = FedNesterov(lr=0.7, momentum=0.9)
    states = {name: optimizer.begin(weight) for name, weight in weights.items()}
    shares = {index: 1 / (index + 1) for index in range(clients)}
    found: dict[str, Any] = {"exchange": [], "all_reduce": []}
    for number in range(rounds + 1):
        before = count_bytes()
        update = {name: each.clone() for name, each in gradient.items()}
        start = begin(group)
        for name, mean in average_in_order(group, update, shares).items():
            optimizer.update(weights[name], mean, states[name], number + 1)
        found["exchange"].append(time.perf_counter() - start)
        sent, received = (after - had for after, had in zip(count_bytes(), before, strict=True))
        found |= {"sent": sent, "received": received}
        flat = [each.clone() for each in gradient.values()]
        start = begin(group)
        all_reduce(group, flat)
        found["all_reduce"].append(time.perf_counter() - start)
    for key in ("exchange", "all_reduce"):
        del found[key][0]  # it connects and allocates
    (Path(folder) / f"{client}.json").write_text(json.dumps(found))
    dist.barrier(group)


def all_reduce(group: dist.ProcessGroup, tensors: list[Tensor]) -> None:
    for tensor in tensors:
        dist.all_reduce(tensor, group=group)


def begin(group: dist.ProcessGroup) -> float:
    """Return the time at which all clients are ready."""
    dist.all_reduce(torch.zeros(1), group=group)
    return time.perf_counter()


def count_bytes() -> tuple[int, int]:
    """Return the bytes that this process's TCP sockets have sent, acknowledged, and received."""
    sent = received = 0
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(descriptor))) as each:
                info = each.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        except OSError:  # closed by now, or no TCP socket
            continue
        sent += struct.unpack_from("Q", info, ACKED)[0]
        received += struct.unpack_from("Q", info, RECEIVED)[0]
    return sent, received


if __name__ == "__main__":
    main()
