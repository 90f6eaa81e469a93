"""A bench: nodes to run commands on, over links of a chosen speed, gone when it is left."""

from __future__ import annotations

import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.cluster import namespaces

from shardmark.base.errors import InputError

ROOT = Path(__file__).resolve().parents[2]
MOST_NODES = 64
GUARD_SECONDS = 30.0
POLL_SECONDS = 0.05
SUBNET = "10.99.0"
"""Visible to the nodes only, so that it may also exist elsewhere."""
UNLIMITED = "unlimited"
LEAST_BITS_PER_SECOND = 1e4
BITS_BY_PREFIX = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}
SPEED = re.compile(r"([0-9]+(?:\.[0-9]+)?) *([kmg]?)bit(?:/s)?", re.IGNORECASE)
WITH_BUILDER = ("setpriv", "--pdeathsig", "KILL")
"""Kills a command with its builder, even before it is on a node, where the guard looks."""
ENTER = 'hostname "$1" && mount --bind "$2" /etc/hosts && shift 2 && exec "$@"'
"""Sets the host name of a node and the names of all nodes, then runs the command."""


def bits_per_second(text: str) -> float | None:
    """Parse a link speed such as `1gbit` or `200mbit/s`; None for `unlimited`.

    Raises `InputError` for any other text.
    """
    if text.lower() == UNLIMITED:
        return None
    match = SPEED.fullmatch(text.strip())
    speed = float(match[1]) * BITS_BY_PREFIX[match[2].lower()] if match else math.nan
    if not speed >= LEAST_BITS_PER_SECOND:
        raise InputError(
            "link speed", f"found {text!r}", "allowed: unlimited, or such as 10gbit, 200mbit"
        )
    return speed


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One machine of the bench."""

    number: int
    namespace: str
    host: str
    address: str


class Bench:
    """The nodes while they exist; `bench` makes it."""

    def __init__(self, prefix: str, nodes: Sequence[Node], hosts_file: Path) -> None:
        self.nodes = tuple(nodes)
        self._prefix = prefix
        self._hosts_file = hosts_file
        self._started: list[subprocess.Popen[bytes]] = []

    def start(
        self,
        node: int,
        words: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        log: Path | None = None,
    ) -> subprocess.Popen[bytes]:
        """Start a command on the node, in the current folder; `log` takes its output."""
        place = self.nodes[node]
        inside = ("unshare", "--uts", "sh", "-c", ENTER, "sh", place.host, str(self._hosts_file))
        output = None if log is None else log.open("ab")
        try:
            started = subprocess.Popen(
                [*WITH_BUILDER, "ip", "netns", "exec", place.namespace, *inside, *words],
                env={**os.environ, **self.environment(node), **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=None if output is None else subprocess.STDOUT,
                start_new_session=True,  # the terminal's Ctrl-C reaches the builder alone
            )
        finally:
            if output is not None:
                output.close()
        self._started.append(started)
        return started

    def end(self) -> None:
        """Kill all started commands and all processes on the nodes."""
        for process in self._started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        namespaces.kill(node.namespace for node in self.nodes)
        for process in self._started:
            process.wait()
        self._started.clear()

    def environment(self, node: int) -> dict[str, str]:
        """Variables that the bench adds to the environment of commands on the node."""
        return {
            "BENCH_NODE": str(node),
            "BENCH_NODES": str(len(self.nodes)),
            "BENCH_MASTER": self.nodes[0].address,
            "SHARDMARK_NODE_RANK": str(node),
            "GLOO_SOCKET_IFNAME": namespaces.INTERFACE,
            "NCCL_SOCKET_IFNAME": namespaces.INTERFACE,
        }

    def run_everywhere(
        self,
        words_of: Callable[[Node], Sequence[str]],
        *,
        seconds: float,
        environment: Mapping[str, str] | None = None,
        logs: Path | None = None,
    ) -> list[int | None]:
        """Run a command on every node at once; exit codes by node, None for those out of time.

        `logs` is a folder for `node0.log` and so on.  Processes left on a node are killed.
        """
        started = [
            self.start(
                node.number,
                words_of(node),
                environment=environment,
                log=None if logs is None else logs / f"{node.host}.log",
            )
            for node in self.nodes
        ]
        deadline = time.monotonic() + seconds
        try:
            while any(one.poll() is None for one in started) and time.monotonic() < deadline:
                time.sleep(POLL_SECONDS)
            return [one.poll() for one in started]
        finally:
            self.end()

    def limit(self, bits_per_second: float | None, *, nodes: Sequence[int] | None = None) -> None:
        """Set the speed of these nodes' links (all by default), one way; None is unlimited."""
        for node in range(len(self.nodes)) if nodes is None else nodes:
            namespaces.limit(self._prefix, node, bits_per_second)

    def cut(self, node: int) -> None:
        """Cut the node's link: packets are lost, and neither end is notified."""
        self._port(node, "nomaster")

    def kill(self, node: int) -> None:
        """Kill every process of the node."""
        namespaces.kill([self.nodes[node].namespace])

    def counters(self, node: int) -> dict[str, dict[str, int]]:
        """Bytes since the node was built: interface -> `sent_bytes` and `received_bytes`."""
        return namespaces.counters(self._prefix, node)

    def _port(self, node: int, *change: str) -> None:
        switch, port = namespaces.switch_name(self._prefix), namespaces.port_name(node)
        namespaces.command("ip", "-n", switch, "link", "set", port, *change)


@contextmanager
def bench(*, nodes: int = 2, bits_per_second: float | None = None) -> Iterator[Bench]:
    """Build nodes with one link of that speed each to a common bridge; needs root.

    A token bucket limits the rate and adds no latency.  Leaving the context, in whatever way, ends
    all processes on the nodes and removes everything.
    """
    namespaces.check_root()
    if not 1 <= nodes <= MOST_NODES:
        raise InputError("nodes", f"found {nodes}", f"allowed are 1 to {MOST_NODES}")
    prefix = namespaces.free_prefix()
    made = [
        Node(
            number=number,
            namespace=namespaces.node_name(prefix, number),
            host=f"node{number}",
            address=f"{SUBNET}.{number + 1}",
        )
        for number in range(nodes)
    ]
    guard = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.cluster.namespaces", prefix],
        stdin=subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])},
        start_new_session=True,
    )
    try:
        with tempfile.TemporaryDirectory(prefix="bench-") as folder:
            hosts = Path(folder) / "hosts"
            hosts.write_text(
                "127.0.0.1 localhost\n::1 localhost\n"
                + "".join(f"{node.address} {node.host}\n" for node in made)
            )
            built = Bench(prefix, made, hosts)
            namespaces.build_switch(prefix)
            for node in made:
                namespaces.build_node(prefix, node.number, f"{node.address}/24")
                namespaces.limit(prefix, node.number, bits_per_second)
            try:
                yield built
            finally:
                built.end()
    finally:
        assert guard.stdin is not None
        guard.stdin.close()
        guard.wait(timeout=GUARD_SECONDS)
