"""At which addresses processes listen, from the kernel's own tables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

import psutil

Address = IPv4Address | IPv6Address
TABLES = {"tcp": "0A", "tcp6": "0A", "udp": "07", "udp6": "07"}
"""And the state in them of a socket to which anybody can send."""


def listening(pids: Iterable[int]) -> set[Address]:
    """Addresses by process with its own network namespace; ended processes are left out."""
    found: set[Address] = set()
    for pid in pids:
        with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            found |= set(_addresses(Path("/proc") / str(pid)))
    return found


def of_this_process() -> set[Address]:
    """And of all below it."""
    own = psutil.Process()
    return listening([own.pid, *(child.pid for child in own.children(recursive=True))])


def is_loopback(address: Address) -> bool:
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return (mapped or address).is_loopback


def _addresses(process: Path) -> Iterator[Address]:
    inodes = set()
    for descriptor in (process / "fd").iterdir():
        with suppress(FileNotFoundError):
            kind, _, number = str(descriptor.readlink()).partition(":[")
            inodes |= {number[:-1]} if kind == "socket" else set()
    for table, state in TABLES.items():
        for line in (process / "net" / table).read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == state and words[9] in inodes:
                digits = words[1].partition(":")[0]
                parts = [bytes.fromhex(digits[i : i + 8])[::-1] for i in range(0, len(digits), 8)]
                yield ip_address(b"".join(parts))
