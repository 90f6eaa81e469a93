"""The store at which the ranks of a trial exchange their addresses.

PyTorch's own rendezvous listens on all interfaces and unpickles what anybody writes there.  Here
nothing listens for a trial on one node.  For several nodes, node 0 listens on its own address, and
no pickle is read.
"""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta

from torch.distributed import (  # type: ignore[attr-defined]  # torch exports them lazily
    Store,
    TCPStore,
)

from shardmark.base.errors import ShardmarkError
from shardmark.bench.launch.placement import MeetingPoint

JOIN_SECONDS = 600.0
POLL_SECONDS = 0.01
WAIT_SECONDS = 0.05
"""Time between two checks whether the ranks of other nodes have finished."""
STORE_SECONDS = 60.0
FAILED = "failed"
"""Key that a node sets when its ranks have failed."""


class FileOfRanks:
    """A file in memory without a name.  Forked ranks inherit it, and it is gone with them."""

    def address(self) -> str:
        """Return the value of `STORE_VARIABLE` for the ranks.  Called once."""
        return f"file /proc/self/fd/{os.memfd_create('store-of-ranks')}"

    def open(self) -> None:
        """Serve the ranks, which the agent has forked, and wait for the agents of all nodes."""

    def close(self, *, succeeded: bool) -> None:
        """Keep the store until the ranks of all nodes have finished; `succeeded` is this node's."""


class NodesStore:
    """A TCP store on node 0, for trials on several nodes and for scripts, which need an address.

    Node 0 listens at once, and serves after `open`: the store has a thread that looks up the name
    of every client under a lock of the C library.  A rank that was forked meanwhile would find that
    lock taken, and wait for ever.
    """

    def __init__(self, nodes: int, place: MeetingPoint) -> None:
        self._nodes = range(nodes)
        self.place = place
        """Address of the store; the port is a free one if the given port is 0."""
        self._listening: socket.socket | None = None
        if place.node == 0:
            # On its own address; torch would listen on all of them.
            family = socket.AF_INET6 if ":" in place.host else socket.AF_INET
            self._listening = socket.create_server((place.host, place.port), family=family)
            self.place = replace(place, port=self._listening.getsockname()[1])
        else:
            self._store = self._connect()  # waits until node 0 serves

    def address(self) -> str:
        return f"tcp {self.place.host} {self.place.port} ranks"

    def open(self) -> None:
        if self._listening is not None:
            self._store = self._connect(self._listening.detach())
        self._store.set(f"joined-{self.place.node}", "")
        deadline = time.monotonic() + JOIN_SECONDS
        while not self._store.check([f"joined-{node}" for node in self._nodes]):
            if self._store.check([FAILED]):
                raise ShardmarkError("another node has failed")
            if time.monotonic() > deadline:
                raise ShardmarkError(f"not all nodes have come in {JOIN_SECONDS:g} s")
            time.sleep(POLL_SECONDS)

    def close(self, *, succeeded: bool) -> None:
        with suppress(RuntimeError):  # node 0 is gone, which the controller notices
            self._store.set(f"finished-{self.place.node}" if succeeded else FAILED, "")
            finished = [f"finished-{node}" for node in self._nodes]
            while succeeded and not (self._store.check(finished) or self._store.check([FAILED])):
                time.sleep(WAIT_SECONDS)

    def _connect(self, listening: int | None = None) -> Store:
        """Connect to node 0's store; on node 0, start it on its listening socket."""
        return TCPStore(
            self.place.host,
            self.place.port,
            is_master=listening is not None,
            wait_for_workers=False,
            timeout=timedelta(seconds=STORE_SECONDS),
            master_listen_fd=listening,
        )
