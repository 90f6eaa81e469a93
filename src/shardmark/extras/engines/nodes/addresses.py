"""Network addresses and interfaces of the machines of a run.  Imports no torch."""

from __future__ import annotations

import os
import re
import socket

import psutil

from shardmark.base.errors import InputError
from shardmark.experiment.engines import LOOPBACK

INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def resolved(host: str, option: str) -> str:
    """Return the host's address; raise `InputError` about the option if it has none."""
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise InputError(
            option,
            f"{host} has no address: {error.strerror or error}",
            "a name or an address of node 0 that every node knows",
        ) from None


def listening_address(host: str, *, nodes: int, interface: str | None, option: str) -> str:
    """Return the address of this machine at which the nodes connect to it.

    A machine's name may resolve to the loopback there, and to the machine elsewhere.
    """
    if nodes == 1:
        return LOOPBACK
    address = resolved(host, option)
    if loops_back(host) or not loops_back(address):
        return address
    candidates = [
        entry.address
        for name, addresses in psutil.net_if_addrs().items()
        for entry in addresses
        if entry.family == socket.AF_INET and not loops_back(entry.address)
        if interface in (None, name)
    ]
    if len(candidates) != 1:
        raise InputError(
            option,
            f"{host} is {address} here; other addresses: {', '.join(candidates) or 'none'}",
            "give the address by which the other nodes reach this machine, or engine.interface",
        )
    return candidates[0]


def loops_back(host: str) -> bool:
    """Return whether the text of the host names the loopback."""
    return host in ("localhost", "::1") or re.fullmatch(r"127(\.\d+){3}", host) is not None


def is_here(host: str) -> bool:
    """Return whether the host is this machine; `user@` before it is ignored."""
    with_address = host.rpartition("@")[2]
    try:
        return loops_back(host) or interface_of(resolved(with_address, "")) is not None
    except InputError:
        return False


def interface_of(address: str) -> str | None:
    """Return the interface of this machine that has the address."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address for entry in addresses):
            return str(name)
    return None


def interface_variables(interface: str | None, address: str) -> dict[str, str]:
    """Return variables that set the interface of gloo and NCCL, unless the user has set them."""
    name = interface or interface_of(address)
    variables = () if name is None else INTERFACE_VARIABLES
    return {variable: str(name) for variable in variables if variable not in os.environ}
