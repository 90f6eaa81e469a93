"""How workers of parameter servers meet outside of their steps."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardmark.core.errors import ShardmarkError
from shardmark.strategies.parameter_server.messages import (
    Kind,
    PeerGone,
    from_bytes,
    receive,
    receive_numbers,
    send,
    send_header,
    to_bytes,
)


class WorkerGroup:
    """Workers meet at the servers, which know who is left."""

    def __init__(self, servers: Sequence[int]) -> None:
        self._servers = servers

    def barrier(self) -> None:
        """Wait until every worker that is left is here; every server learns of it."""
        for server in self._servers:
            self._meet(server, None)

    def gather(self, value: object) -> list[object]:
        """The value of every worker that is left, in order of rank."""
        return self._meet(self._servers[0], value)

    def _meet(self, server: int, value: object) -> list[object]:
        try:
            content = to_bytes(value)
            send_header(server, Kind.GATHER, len(content))
            send(content, server)
            (size,) = receive_numbers(1, server)
            everybody = torch.empty(size, dtype=torch.uint8)
            receive(everybody, server)
        except PeerGone as gone:
            raise server_gone(gone) from gone
        found = from_bytes(everybody)
        assert isinstance(found, list)
        return found


def server_gone(gone: PeerGone) -> ShardmarkError:
    return ShardmarkError(f"the parameter server, rank {gone.rank}, is gone; see log.txt")
