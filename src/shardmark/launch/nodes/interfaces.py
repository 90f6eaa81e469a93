"""Which network interface gloo and NCCL are to use on a node."""

from __future__ import annotations

import os

import psutil

INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def interface_variables(interface: str | None, address: str) -> dict[str, str]:
    """What tells gloo and NCCL the network interface; nothing that the user has set himself."""
    name = interface or interface_of(address)
    wanted = () if name is None else INTERFACE_VARIABLES
    return {variable: str(name) for variable in wanted if variable not in os.environ}


def interface_of(address: str) -> str | None:
    """The interface of this machine that has the address."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address.partition("%")[0] == address for one in addresses):
            return str(name)
    return None
