"""Where rank 0 listens for the other ranks: at the address that they were given. Torch-free."""

from __future__ import annotations

import errno
import ipaddress
import socket
from collections.abc import Iterator

Address = tuple[socket.AddressFamily, str]


def open_listener(host: str, port: int, *, has_other_nodes: bool) -> socket.socket:
    """Return a socket that listens at the address of a host, which is this machine.

    It listens at all addresses where that one cannot be used: it is not this machine's own (a
    Kubernetes service, an address that is translated), or it is a loopback address (Debian gives
    its own name one) while ranks on other machines are to reach it.

    Args:
        host: name or address that the ranks were given.
        port: free there.
        has_other_nodes: whether ranks on other machines connect.

    Raises:
        OSError: the port is in use, or the host has no address.
    """
    for family, address in _addresses(host, port):
        if has_other_nodes and ipaddress.ip_address(address.partition("%")[0]).is_loopback:
            continue
        try:
            return _listen(family, address, port)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
    if socket.has_dualstack_ipv6():
        return _listen(socket.AF_INET6, "::", port)
    return _listen(socket.AF_INET, "0.0.0.0", port)


def _addresses(host: str, port: int) -> Iterator[Address]:
    for family, _, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        if family in (socket.AF_INET, socket.AF_INET6):
            yield family, str(address[0])


def _listen(family: socket.AddressFamily, address: str, port: int) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6 and address == "::":
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind((address, port))
        listener.listen(socket.SOMAXCONN)
    except OSError:
        listener.close()
        raise
    return listener
