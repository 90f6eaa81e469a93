"""Where the launchers of a trial's nodes meet before each start of the ranks, and then the ranks.

PyTorch's own rendezvous listens on all interfaces and unpickles what anybody writes there.  Here
nobody listens on one node; of several, node 0 does on its own address, and no pickle is read.
"""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress
from datetime import timedelta
from itertools import count

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
WAIT_SECONDS = 0.05
"""Between two looks at nodes that still train."""
STORE_SECONDS = 60.0


class NodesRendezvous(RendezvousHandler):
    """Rounds: each is over once every node has joined it, and is one start of all ranks.

    A node that starts its ranks anew joins the next round, which the others see.  One that takes a
    lost node's place joins the first round that is not over.
    """

    def __init__(self, trial_id: str, nodes: int, here: MeetingPoint) -> None:
        self.round = -1
        """The last one that this node has joined: so often have all ranks been started before."""
        self._trial_id = trial_id
        self._nodes = nodes
        self._here = here
        self._store = HashStore() if nodes == 1 else _store_of_node_0(here)
        self._reachable = True
        self._memory_file: int | None = None

    def next_rendezvous(self) -> RendezvousInfo:
        self.round = self._join()
        os.environ[STORE_VARIABLE] = self._store_of_ranks()
        return RendezvousInfo(
            PrefixStore(f"launchers-{self.round}", self._store),
            self._here.node,
            self._nodes,
            RendezvousStoreInfo(self._here.host, self._here.port),
        )

    def num_nodes_waiting(self) -> int:
        with suppress(RuntimeError):
            return int(self._reachable and self._store.check([f"begun-{self.round + 1}"]))
        self._reachable = False  # node 0 is gone, which is the controller's to deal with
        return 0

    def wait_for_others(self) -> bool:
        """This node's ranks have ended well.  Whether all nodes' have, or one has failed for good:
        else it starts its ranks anew, and needs these again."""
        with suppress(RuntimeError):  # as above
            self._store.set(_finished(self.round, self._here.node), "")
            all_finished = [_finished(self.round, node) for node in range(self._nodes)]
            while not (self._store.check(all_finished) or self.is_closed()):
                if self.num_nodes_waiting():
                    return False
                time.sleep(WAIT_SECONDS)
        return True

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

    def _join(self) -> int:
        number = next(n for n in count(self.round + 1) if not self._is_over(n))
        for key in (f"begun-{number}", _joined(number, self._here.node)):
            self._store.set(key, "")
        deadline = time.monotonic() + JOIN_SECONDS
        while not self._is_over(number):
            if self.is_closed():
                raise RendezvousClosedError("another node has ended")
            if time.monotonic() > deadline:
                raise RendezvousTimeoutError(f"not all nodes have come in {JOIN_SECONDS:g} s")
            time.sleep(POLL_SECONDS)
        return number

    def _is_over(self, number: int) -> bool:
        return bool(self._store.check([_joined(number, node) for node in range(self._nodes)]))

    def _store_of_ranks(self) -> str:
        """A new one each time: in the old one are the addresses of the dead."""
        if self._nodes > 1:
            return f"tcp {self._here.host} {self._here.port} ranks-{self.round}"
        if self._memory_file is not None:
            os.close(self._memory_file)
        # Ranks are forked and inherit it.  It has no name and is gone with them, however they end.
        self._memory_file = os.memfd_create("store-of-ranks")
        return f"file /proc/self/fd/{self._memory_file}"


def _joined(number: int, node: int) -> str:
    return f"joined-{number}-{node}"


def _finished(number: int, node: int) -> str:
    return f"finished-{number}-{node}"


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
