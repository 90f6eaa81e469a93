"""How a node comes to the controller; as a program, what engines start on a node."""

from __future__ import annotations

import argparse
import os
import platform
import signal
import socket
import sys
import time
from collections.abc import Mapping

from shardmark.core.errors import ShardmarkError
from shardmark.core.version import __version__
from shardmark.launch.local.rank_starter import RankStarter
from shardmark.launch.nodes.channel import Channel, ChannelEndedError
from shardmark.launch.nodes.node import Node
from shardmark.measure.system.environment import package_version

RETRY_SECONDS = 0.5


def join(
    address: tuple[str, int],
    *,
    number: int | None,
    here: bool,
    interface: str | None,
    key: Mapping[str, str],
    join_seconds: float,
    nursery: RankStarter | None = None,
) -> Node:
    """Come to the controller, waiting for it if need be.  Raises `ShardmarkError` if refused."""
    connection = _connected(address, join_seconds)
    channel = Channel(connection, patience_seconds=join_seconds)
    hello = {"number": number, "host": platform.node(), "key": dict(key)}
    try:
        channel.send(hello | {"address": channel.own_address})
        answer, _ = channel.receive()
    except ChannelEndedError as ended:
        channel.close()
        raise ShardmarkError(f"{address[0]}:{address[1]} takes no nodes: {ended}") from None
    if "refused" in answer:
        channel.close()
        raise ShardmarkError(f"{address[0]}:{address[1]} refuses this node: {answer['refused']}")
    patience = float(answer["patience_seconds"])
    channel.set_patience(patience)
    number = int(answer["welcome"])
    return Node(
        channel,
        number=number,
        here=here,
        interface=interface,
        patience=patience,
        nursery=nursery,
    )


def _connected(address: tuple[str, int], join_seconds: float) -> socket.socket:
    deadline = time.monotonic() + join_seconds
    while True:
        try:
            return socket.create_connection(address, timeout=join_seconds)
        except OSError as error:
            if time.monotonic() > deadline:
                raise ShardmarkError(
                    f"no controller at {address[0]}:{address[1]} within {join_seconds:g} s: "
                    f"{error.strerror or error}"
                ) from None
            time.sleep(RETRY_SECONDS)


def own_versions() -> dict[str, str]:
    """What must be the same on every node."""
    return {"shardmark": __version__, "torch": str(package_version("torch"))}


def main() -> int:
    """`python -m shardmark.launch.nodes.joining`: what engines start on a node."""
    parser = argparse.ArgumentParser(prog="shardmark.launch.nodes.joining")
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--number", type=int)
    parser.add_argument("--number-from", metavar="VARIABLE", help="of the environment")
    parser.add_argument("--here", action="store_true", help="node 0 works in the trial's folder")
    parser.add_argument("--interface")
    parser.add_argument("--key", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--join-seconds", type=float, default=300.0)
    given = parser.parse_args()
    # An end from outside is tidy: ranks are ended, and folders removed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    number = given.number if given.number_from is None else int(os.environ[given.number_from])
    try:
        node = join(
            (given.host, given.port),
            number=number,
            here=given.here and number == 0,
            interface=given.interface,
            key=dict(pair.split("=", 1) for pair in given.key) | own_versions(),
            join_seconds=given.join_seconds,
        )
    except ShardmarkError as error:
        print(error, file=sys.stderr)
        return 1
    try:
        reason = node.serve()
    except ShardmarkError as error:
        reason = str(error)
    if reason is not None:
        print(f"the controller is gone: {reason}", file=sys.stderr)
    return int(reason is not None)


if __name__ == "__main__":
    sys.exit(main())
