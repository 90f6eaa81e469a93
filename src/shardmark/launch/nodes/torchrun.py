"""The engine `torchrun`: hosts without a scheduler, each with one node process."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Mapping, Sequence

from shardmark.config.engines import TorchrunOptions
from shardmark.core.errors import InputError, ShardmarkError
from shardmark.launch.nodes.cluster import ClusterEngine
from shardmark.launch.nodes.host_commands import Commands, listening_address, resolved
from shardmark.launch.nodes.interfaces import interface_of
from shardmark.launch.nodes.joining import join
from shardmark.launch.nodes.roster import Roster

RANK_VARIABLE = "SHARDMARK_NODE_RANK"


def check(options: TorchrunOptions, nodes: int) -> None:
    """Raise `InputError` where these options cannot bring so many nodes together."""
    if options.hosts and len(options.hosts) < nodes:
        raise InputError(
            "engine.hosts",
            f"{len(options.hosts)} hosts, and the experiment takes {nodes} nodes",
            "name one host for each node",
        )
    if nodes > 1 and not options.hosts and not options.address[1]:
        raise InputError(
            "engine.rendezvous",
            f"{options.rendezvous or 'missing'}, and the experiment takes {nodes} nodes",
            "give HOST:PORT of node 0 in the same command on every node, or engine.hosts",
        )
    rank = own_rank(options)
    if rank is not None and rank >= nodes:
        raise InputError(
            RANK_VARIABLE if options.node_rank is None else "engine.node_rank",
            f"found {rank}, and the experiment takes {nodes} node{'' if nodes == 1 else 's'}",
            f"allowed is 0 to {nodes - 1}" if nodes > 1 else "allowed is 0",
        )
    if nodes > 1 and options.hosts:
        _check_others_reach(options, nodes)


def _check_others_reach(options: TorchrunOptions, nodes: int) -> None:
    """By a loopback address, each of the others would come to itself."""
    host = options.address[0]
    if "{host}" not in options.remote or not _loops_back(host):
        return
    others = [one for one in options.hosts[1:nodes] if not _is_here(one)]
    if others:
        raise InputError(
            "engine.hosts" if options.rendezvous is None else "engine.rendezvous",
            f"{host} is every machine's own name for itself, and {others[0]} is another machine",
            "give node 0 a name or an address by which the others reach it",
        )


def _loops_back(host: str) -> bool:
    """By its text: a machine's name may lead to its loopback there, elsewhere to the machine."""
    return host in ("localhost", "::1") or re.fullmatch(r"127(\.\d+){3}", host) is not None


def _is_here(host: str) -> bool:
    if _loops_back(host):
        return True
    try:
        return is_own(resolved(host.rpartition("@")[2]))
    except InputError:
        return False


def own_rank(options: TorchrunOptions, environment: Mapping[str, str] = os.environ) -> int | None:
    """This process's node by option or environment; None where neither says."""
    if options.node_rank is not None or options.hosts:
        return options.node_rank or 0
    text = environment.get(RANK_VARIABLE)
    if text is not None and not text.isdecimal():
        raise InputError(RANK_VARIABLE, f"found {text!r}", "a node's number, from 0")
    return None if text is None else int(text)


def serve(
    options: TorchrunOptions, nodes: int, key: Mapping[str, str], tell: Callable[[str], None]
) -> bool:
    """Be a node until the run ends, if this process is one that does not control it.

    Raises `ShardmarkError` where the controller does not come, or goes.
    """
    check(options, nodes)
    rank = own_rank(options)
    host, port = options.address
    if rank == 0 or nodes == 1 or (rank is None and is_own(resolved(host))):
        return False
    node = join(
        (resolved(host), port),
        number=rank,
        here=False,
        interface=options.interface,
        key=key,
        join_seconds=options.join_seconds,
    )
    tell(f"this is node {node.number}; {host}:{port} controls the run")
    reason = node.serve()
    if reason is not None:
        raise ShardmarkError(f"the controller at {host}:{port} is gone: {reason}")
    return True


def build(
    options: TorchrunOptions, nodes: int, key: Mapping[str, str], tell: Callable[[str], None]
) -> ClusterEngine:
    """The controlling side; nothing is started yet."""
    check(options, nodes)
    host, port = options.address
    address = listening_address(resolved(host))

    def make_roster() -> Roster:
        try:
            return Roster((address, port), wanted=nodes, key=key, patience=options.node_seconds)
        except OSError as error:
            raise InputError(
                "engine.rendezvous",
                f"this machine cannot listen at {host}:{port}: {error.strerror or error}",
                "an address of node 0 and a free port",
            ) from None

    return ClusterEngine(
        make_roster, Commands(options, nodes, key), join_seconds=options.join_seconds, tell=tell
    )


def submission(options: TorchrunOptions, nodes: int, command: Sequence[str]) -> list[str]:
    """What would be run, and where."""
    check(options, nodes)
    if not options.hosts:
        return [f"on each of {nodes} nodes: {shlex.join(command)}"] if nodes > 1 else []
    starter = Commands(options, nodes, {})
    shown = options.address[0], options.address[1] or "PORT"
    return [
        f"node {number}, {options.hosts[number]}: {shlex.join(starter.remote(number, *shown))}"
        for number in range(1, nodes)
    ]


def is_own(address: str) -> bool:
    """Whether some interface of this machine has the address."""
    return interface_of(address) is not None
