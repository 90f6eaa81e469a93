"""What each rank's processes sent and received over TCP, by interface.  Linux only, without torch.

An interface's own counters are the machine's: they cannot tell whose bytes they were.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from shardmark.measure.network.tcp_sockets import TcpSocket, tcp_sockets

LOOPBACK = "lo"
Counters = dict[str, dict[str, int]]
"""bytes_sent and bytes_received by interface."""
_Key = tuple[int, str]


def interface_addresses() -> dict[str, str]:
    """Interface by address."""
    import psutil

    return {
        address.address.partition("%")[0]: name
        for name, addresses in psutil.net_if_addrs().items()
        for address in addresses
    }


class RankTraffic:
    """Counts that go on when a connection ends."""

    def __init__(
        self,
        proc: Path = Path("/proc"),
        *,
        sockets: Callable[[], Iterable[TcpSocket]] = tcp_sockets,
        addresses: Callable[[], Mapping[str, str]] = interface_addresses,
    ) -> None:
        self.reason: str | None = None
        """Why nothing is known: the kernel does not tell."""
        self._proc = proc
        self._sockets = sockets
        self._addresses = addresses
        self._interfaces: Mapping[str, str] = {}
        self._pids: frozenset[int] = frozenset()
        self._owners: dict[int, int | None] = {}
        self._last: dict[int, tuple[_Key, int, int]] = {}
        """By inode, of the connections that were open when last read."""
        self._totals: dict[_Key, tuple[int, int]] = {}

    def read(self, pids: Mapping[int, Sequence[int]]) -> dict[int, Counters]:
        """By rank, from the processes of each; a rank without a connection has no interface."""
        if self.reason is not None or not pids:
            return {}
        try:
            by_inode = {tcp.inode: tcp for tcp in self._sockets()}
        except OSError as error:
            self.reason = f"the kernel does not tell sockets' bytes: {error.strerror or error}"
            return {}
        self._assign(by_inode, pids)
        self._count(by_inode)
        return self._summed(pids)

    def _assign(self, by_inode: Mapping[int, TcpSocket], pids: Mapping[int, Sequence[int]]) -> None:
        """Whose each socket is; folders are read only for sockets or processes that are new."""
        self._owners = {inode: rank for inode, rank in self._owners.items() if inode in by_inode}
        known, self._pids = self._pids, frozenset(pid for own in pids.values() for pid in own)
        if by_inode.keys() <= self._owners.keys() and self._pids <= known:
            return
        owned = {
            inode: rank for rank, own in pids.items() for pid in own for inode in self._inodes(pid)
        }
        for inode in by_inode:
            if self._owners.get(inode) is None and (inode in owned or inode not in self._owners):
                self._owners[inode] = owned.get(inode)

    def _count(self, by_inode: Mapping[int, TcpSocket]) -> None:
        open_now: dict[int, tuple[_Key, int, int]] = {}
        for inode, tcp in by_inode.items():
            rank = self._owners[inode]
            if rank is None:
                continue
            key = (rank, self._interface(tcp))
            before_key, sent, received = self._last.get(inode, (key, 0, 0))
            if before_key != key or tcp.sent_bytes < sent or tcp.received_bytes < received:
                sent = received = 0  # it has ended, and its number is in use again
            sent_total, received_total = self._totals.get(key, (0, 0))
            self._totals[key] = (
                sent_total + tcp.sent_bytes - sent,
                received_total + tcp.received_bytes - received,
            )
            open_now[inode] = (key, tcp.sent_bytes, tcp.received_bytes)
        self._last = open_now

    def _summed(self, pids: Mapping[int, Sequence[int]]) -> dict[int, Counters]:
        counters: dict[int, Counters] = {rank: {} for rank in pids}
        for (rank, interface), (sent, received) in sorted(self._totals.items()):
            if rank in counters:
                counters[rank][interface] = {"bytes_sent": sent, "bytes_received": received}
        return counters

    def _interface(self, tcp: TcpSocket) -> str:
        """What goes to an address of this machine takes the loopback, whatever the address."""
        if tcp.local not in self._interfaces:
            self._interfaces = self._addresses()
        if tcp.remote in self._interfaces:
            return LOOPBACK
        return self._interfaces.get(tcp.local, tcp.local)

    def _inodes(self, pid: int) -> Iterable[int]:
        folder = self._proc / str(pid) / "fd"
        try:
            names = os.listdir(folder)  # noqa: PTH208  # several times a Path's speed
        except OSError:
            return
        for name in names:
            try:
                target = os.readlink(f"{folder}/{name}")  # noqa: PTH115
            except OSError:
                continue
            if target.startswith("socket:["):
                yield int(target[8:-1])
