"""Rank 0 listens where the other ranks look for it, and nowhere else."""

from __future__ import annotations

import errno
import socket
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from trainer.engine.launch import group
from trainer.engine.launch.environment import World
from trainer.engine.launch.group import open_listener

ANYWHERE = ("::", "0.0.0.0")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_it_listens_at_the_address_that_was_given() -> None:
    with open_listener("127.0.0.1", free_port(), has_other_nodes=False) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"


@pytest.mark.parametrize(
    ("host", "has_other_nodes", "why"),
    [
        ("192.0.2.1", False, "the address of a service, which is not this machine's own"),
        ("127.0.1.1", True, "Debian's address of this machine's name: others cannot reach it"),
    ],
)
def test_it_listens_everywhere_where_that_address_cannot_be_used(
    host: str, has_other_nodes: bool, why: str
) -> None:
    with open_listener(host, free_port(), has_other_nodes=has_other_nodes) as listener:
        assert listener.getsockname()[0] in ANYWHERE, why


def test_a_name_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0))
        for address in ("127.0.1.1", "127.0.0.1")
    ]
    monkeypatch.setattr(group.socket, "getaddrinfo", lambda *_, **__: found)
    with open_listener("node-0", free_port(), has_other_nodes=False) as listener:
        assert listener.getsockname()[0] == "127.0.1.1"


def test_a_port_in_use_is_no_reason_to_listen_elsewhere() -> None:
    with socket.socket() as occupied:
        occupied.bind(("127.0.0.1", 0))
        occupied.listen()
        with pytest.raises(OSError, match="in use") as raised:
            open_listener("127.0.0.1", occupied.getsockname()[1], has_other_nodes=False)
    assert raised.value.errno == errno.EADDRINUSE


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="reads Linux's table of sockets")
@pytest.mark.parametrize("launcher", ["slurm", "torchrun"])
def test_the_rendezvous_of_a_job_on_one_machine_is_closed_to_others(launcher: str) -> None:
    port = free_port()
    world = World(0, 2, 0, 2, 0, launcher, f"tcp://127.0.0.1:{port}")
    store = group._store(world, timedelta(seconds=10))
    other = TCPStore("127.0.0.1", port, 2, wait_for_workers=False)
    store.set("key", "value")
    assert other.get("trainer/attempt0/key") == b"value"
    lines = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]
    listening = [
        words[1] for words in lines if words[3] == "0A" and words[1].endswith(f"{port:04X}")
    ]
    assert listening == [f"0100007F:{port:04X}"]
