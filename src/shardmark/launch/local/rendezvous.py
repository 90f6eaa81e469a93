"""Where the launchers of a trial's nodes meet before the ranks start, and then the ranks.

PyTorch's own rendezvous listens on all interfaces and unpickles what anybody writes there.  Here
nobody listens on one node; of several, node 0 does on its own address, and no pickle is read.
"""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress
from datetime import timedelta

from torch.distributed import (  # type: ignore[attr-defined]  # torch exports them lazily
    HashStore,
    PrefixStore,
    Store,
    TCPStore,
)
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from shardmark.core.environment_variables import STORE_VARIABLE
from shardmark.launch.placement import MeetingPoint

CLOSED = "closed"
JOIN_SECONDS = 600.0
POLL_SECONDS = 0.01
STORE_SECONDS = 60.0


class NodesRendezvous(RendezvousHandler):
    """The launchers of all nodes wait here for each other."""

    def __init__(self, trial_id: str, nodes: int, here: MeetingPoint) -> None:
        self._trial_id = trial_id
        self._nodes = nodes
        self._here = here
        self._store = HashStore() if nodes == 1 else _store_of_node_0(here)

    def next_rendezvous(self) -> RendezvousInfo:
        self._join()
        os.environ[STORE_VARIABLE] = self._store_of_ranks()
        return RendezvousInfo(
            PrefixStore("launchers", self._store),
            self._here.node,
            self._nodes,
            RendezvousStoreInfo(self._here.host, self._here.port),
        )

    def num_nodes_waiting(self) -> int:
        return 0

    def is_closed(self) -> bool:
        return bool(self._store.check([CLOSED]))

    def set_closed(self) -> None:
        self._store.set(CLOSED, "")

    def shutdown(self) -> bool:
        with suppress(RuntimeError):
            self.set_closed()
        return True

    def get_backend(self) -> str:
        return "shardmark"

    def get_run_id(self) -> str:
        return self._trial_id

    def _join(self) -> None:
        self._store.set(f"joined-{self._here.node}", "")
        deadline = time.monotonic() + JOIN_SECONDS
        while not self._store.check([f"joined-{node}" for node in range(self._nodes)]):
            if self.is_closed():
                raise RendezvousClosedError("another node has ended")
            if time.monotonic() > deadline:
                raise RendezvousTimeoutError(f"not all nodes have come in {JOIN_SECONDS:g} s")
            time.sleep(POLL_SECONDS)

    def _store_of_ranks(self) -> str:
        if self._nodes > 1:
            return f"tcp {self._here.host} {self._here.port} ranks"
        # Ranks are forked and inherit it.  It has no name and is gone with them, however they end.
        return f"file /proc/self/fd/{os.memfd_create('store-of-ranks')}"


def _store_of_node_0(here: MeetingPoint) -> Store:
    """Node 0 listens at its own address, where torch would do so at all of the machine's."""
    listening = None
    if here.node == 0:
        family = socket.AF_INET6 if ":" in here.host else socket.AF_INET
        listening = socket.create_server((here.host, here.port), family=family).detach()
    return TCPStore(
        here.host,
        here.port,
        is_master=here.node == 0,
        wait_for_workers=False,
        timeout=timedelta(seconds=STORE_SECONDS),
        master_listen_fd=listening,
    )
