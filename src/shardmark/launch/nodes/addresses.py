"""Which addresses and interfaces the machines of a run use.  Imports no torch."""

from __future__ import annotations

import os
import re
import socket

import psutil

from shardmark.config.engines import LOOPBACK
from shardmark.core.errors import InputError

INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def resolved(host: str, option: str) -> str:
    """The host's address; `InputError` about the option if it has none."""
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise InputError(
            option,
            f"{host} has no address: {error.strerror or error}",
            "a name or an address of node 0 that every node knows",
        ) from None


def listening_address(host: str, *, nodes: int, interface: str | None, option: str) -> str:
    """The one address of this machine at which its nodes come to it.

    A machine's own name may lead to its loopback there, and elsewhere to the machine.
    """
    if nodes == 1:
        return LOOPBACK
    address = resolved(host, option)
    if loops_back(host) or not loops_back(address):
        return address
    own = [
        known.address
        for name, addresses in psutil.net_if_addrs().items()
        for known in addresses
        if known.family == socket.AF_INET and not loops_back(known.address)
        if interface in (None, name)
    ]
    if len(own) != 1:
        raise InputError(
            option,
            f"{host} leads to {address} here; other addresses: {', '.join(own) or 'none'}",
            "give the address by which the other nodes reach this machine, or engine.interface",
        )
    return own[0]


def loops_back(host: str) -> bool:
    """By its text alone."""
    return host in ("localhost", "::1") or re.fullmatch(r"127(\.\d+){3}", host) is not None


def is_here(host: str) -> bool:
    """Whether the host is this machine; `user@` before it says nothing."""
    with_address = host.rpartition("@")[2]
    try:
        return loops_back(host) or interface_of(resolved(with_address, "")) is not None
    except InputError:
        return False


def interface_of(address: str) -> str | None:
    """The interface of this machine that has the address."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(known.address.partition("%")[0] == address for known in addresses):
            return str(name)
    return None


def interface_variables(interface: str | None, address: str) -> dict[str, str]:
    """What tells gloo and NCCL the network interface; nothing that the user has set himself."""
    name = interface or interface_of(address)
    wanted = () if name is None else INTERFACE_VARIABLES
    return {variable: str(name) for variable in wanted if variable not in os.environ}


def free_port(address: str) -> int:
    """A port of this machine that nobody listens on."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])
