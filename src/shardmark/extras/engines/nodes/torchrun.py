"""The engine `torchrun`: runs on hosts without a scheduler, each with one node process."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from shardmark.base.errors import InputError, ShardmarkError
from shardmark.base.text import counted
from shardmark.bench.launch.engine import EngineRequest
from shardmark.bench.launch.started_command import StartedCommand
from shardmark.experiment.engines import TorchrunOptions
from shardmark.extras.engines.nodes.addresses import (
    interface_of,
    is_here,
    listening_address,
    loops_back,
    resolved,
)
from shardmark.extras.engines.nodes.engine import NodesEngine, NodeStarter
from shardmark.extras.engines.nodes.node import join
from shardmark.extras.engines.nodes.protocol import JoinOptions, new_secret, shared_secret
from shardmark.extras.engines.nodes.registry import NodeRegistry

RANK_VARIABLE = "SHARDMARK_NODE_RANK"
END_SECONDS = 10.0
"""Time limit for a node process to end after it was told to."""


class HostCommands(NodeStarter):
    """Starts node 0's process on this machine, and the others on the hosts, if any are named."""

    def __init__(self, options: TorchrunOptions, key: Mapping[str, str], secret: str) -> None:
        self.secret = secret
        self._options = options
        self._key = key
        self._started: dict[int, StartedCommand] = {}
        self._registry: NodeRegistry | None = None

    def address(self, nodes: int) -> tuple[str, int]:
        host, port = self._options.address
        interface = self._options.interface
        option = "engine.rendezvous"
        return listening_address(host, nodes=nodes, interface=interface, option=option), port

    def start(self, registry: NodeRegistry, title: str) -> None:  # noqa: ARG002  # the protocol's signature
        self._registry = registry
        host, port = self.address(registry.num_nodes)[0], registry.port
        local = JoinOptions.to(host, port, self._options, self._key, number=0, with_files=True)
        self._start(0, [sys.executable, *local.words()], "engine")
        for number in range(1, registry.num_nodes if self._options.hosts else 1):
            self._start(number, self.remote(number, port), "engine.remote")

    def _start(self, number: int, words: Sequence[str], option: str) -> None:
        # The secret is not an argument: every user of the machine can read those.
        self._started[number] = StartedCommand(words, option=option, first_line=self.secret)

    def remote(self, number: int, port: int) -> list[str]:
        """Return the command that starts a node process on another host."""
        host = self._options.address[0]
        join_options = JoinOptions.to(host, port, self._options, self._key, number=number)
        node = shlex.join([self._options.python or sys.executable, *join_options.words()])
        path = os.environ.get("PYTHONPATH")
        variables = f"PYTHONPATH={shlex.quote(path)} " if path else ""
        command = ["sh", "-c", f"cd {shlex.quote(str(Path.cwd()))} && {variables}exec {node}"]
        placeholders = {"{host}": self._options.hosts[number], "{quoted}": shlex.join(command)}
        words: list[str] = []
        for word in shlex.split(self._options.remote):
            text = re.sub(r"{host}|{quoted}", lambda match: placeholders[match[0]], word)
            words += command if word == "{command}" else [text]
        return words

    def check(self) -> None:
        for number, command in self._started.items():
            failure = command.failure()
            if failure is not None:
                host = f" ({self._options.hosts[number]})" if self._options.hosts else ""
                raise ShardmarkError(f"the command that starts node {number}{host} {failure}")

    def close(self) -> None:
        joined = set(self._registry.nodes) if self._registry else set()
        for number, command in self._started.items():
            # A node that has not joined was not told to end, and would go on trying.
            command.close(END_SECONDS if number in joined else 0.0)
        self._started.clear()


def check(options: TorchrunOptions, nodes: int) -> None:
    """Raise `InputError` if so many nodes cannot meet by these options."""
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
    rank = node_rank(options)
    if rank is not None and rank >= nodes:
        raise InputError(
            RANK_VARIABLE if options.node_rank is None else "engine.node_rank",
            f"found {rank}, and the experiment takes {counted(nodes, 'node')}",
            f"allowed is 0 to {nodes - 1}" if nodes > 1 else "allowed is 0",
        )
    host = options.address[0]
    if "{host}" in options.remote and loops_back(host):
        # By that address, each of the other nodes would connect to itself.
        others = [other for other in options.hosts[1:nodes] if not is_here(other)]
        if others:
            raise InputError(
                "engine.hosts" if options.rendezvous is None else "engine.rendezvous",
                f"{host} names each machine itself, and {others[0]} is another machine",
                "give node 0 a name or an address by which the others reach it",
            )


def node_rank(options: TorchrunOptions, environment: Mapping[str, str] = os.environ) -> int | None:
    """Return this process's node from option or environment; None if neither is set."""
    if options.node_rank is not None or options.hosts:
        return options.node_rank or 0
    text = environment.get(RANK_VARIABLE)
    if text is not None and not text.isdecimal():
        raise InputError(RANK_VARIABLE, f"found {text!r}", "a node's number, from 0")
    return None if text is None else int(text)


def serve_as_node(options: TorchrunOptions, request: EngineRequest) -> int | None:
    """Serve as a node until the run ends, unless this process controls the run.

    Raises `ShardmarkError` if the controller does not start, or the connection to it ends.
    """
    check(options, request.nodes)
    rank = node_rank(options)
    host, port = options.address
    if rank == 0 or request.nodes == 1:
        return None
    address = resolved(host, "engine.rendezvous")
    if rank is None and (loops_back(address) or interface_of(address) is not None):
        return None
    join_options = JoinOptions.to(address, port, options, request.key, number=rank)
    node = join(join_options, shared_secret())
    request.notify(f"this is node {node.number}; {host}:{port} controls the run")
    reason = node.serve()
    if reason is not None:
        raise ShardmarkError(f"the connection to the controller at {host}:{port} ended: {reason}")
    return 0


def build(options: TorchrunOptions, request: EngineRequest) -> NodesEngine:
    """Build the controlling side; start nothing yet."""
    check(options, request.nodes)
    starts_nodes = bool(options.hosts) or request.nodes == 1
    secret = new_secret() if starts_nodes else shared_secret()
    starter = HostCommands(options, request.key, secret)
    starter.address(request.nodes)  # raises an error now if there is none
    return NodesEngine(options, starter, request)


def submission(
    options: TorchrunOptions, request: EngineRequest, command: Sequence[str]
) -> list[str]:
    """Return the command of each node, one a line."""
    check(options, request.nodes)
    if not options.hosts:
        line = f"on each of {request.nodes} nodes: {shlex.join(command)}"
        return [line] if request.nodes > 1 else []
    starter, port = HostCommands(options, {}, ""), options.address[1]
    return [
        f"node {number}, {options.hosts[number]}: {shlex.join(starter.remote(number, port))}"
        for number in range(1, request.nodes)
    ]
