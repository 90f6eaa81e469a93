"""Builds and removes the namespaces of a bench with `ip` and `tc`.  Root only.

The bridge has a namespace of its own, and every cable is made inside the namespaces that it joins:
the host's namespace, and so its interfaces, are never touched, and deleting the namespaces deletes
everything.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from shardmark.base.errors import ShardmarkError

NAMESPACES = Path("/run/netns")
INTERFACE = "eth0"
"""Each node's only interface beside its loopback."""
BRIDGE = "bridge"
QUEUE_SECONDS = 0.05
"""Time that a limited link queues packets before it drops them."""
LEAST_BURST_BYTES = 72 * 1024
"""Size of the largest packet that the kernel hands down (64 KiB and headers)."""
BURST_SECONDS = 0.25e-3
KILL_SECONDS = 10.0


def check_root() -> None:
    """Raise `ShardmarkError` if namespaces cannot be made here."""
    if os.geteuid() != 0:
        raise ShardmarkError("a bench of network namespaces can be built by root only")
    missing = [tool for tool in ("ip", "tc", "unshare", "setpriv") if shutil.which(tool) is None]
    if missing:
        raise ShardmarkError(
            f"no {missing[0]}: install iproute2 and util-linux (apt-get install iproute2)"
        )


def command(*words: str) -> str:
    """Run a command; return its standard output, or raise its message as `ShardmarkError`."""
    done = subprocess.run(words, check=False, capture_output=True, text=True)
    if done.returncode:
        complaint = done.stderr.strip() or f"exit code {done.returncode}"
        raise ShardmarkError(f"`{' '.join(words)}` failed: {complaint}")
    return done.stdout


def free_prefix() -> str:
    """Returns a prefix for the names of a new bench that no other bench has."""
    taken = {path.name.partition("-")[0] for path in _existing("")}
    count = 0
    while (prefix := f"smk{os.getpid():x}x{count:x}") in taken:
        count += 1
    return prefix


def switch_name(prefix: str) -> str:
    return f"{prefix}-switch"


def node_name(prefix: str, node: int) -> str:
    return f"{prefix}-node{node}"


def build_switch(prefix: str) -> None:
    switch = switch_name(prefix)
    command("ip", "netns", "add", switch)
    command("ip", "-n", switch, "link", "set", "lo", "up")
    command("ip", "-n", switch, "link", "add", BRIDGE, "type", "bridge")
    command("ip", "-n", switch, "link", "set", BRIDGE, "up")


def build_node(prefix: str, node: int, address: str) -> None:
    """A namespace with its loopback and one cable to the bridge; `address` with prefix length."""
    switch, name, port = switch_name(prefix), node_name(prefix, node), port_name(node)
    command("ip", "netns", "add", name)
    cable = ("type", "veth", "peer", "name", INTERFACE, "netns", name)
    command("ip", "-n", switch, "link", "add", port, *cable)
    command("ip", "-n", switch, "link", "set", port, "master", BRIDGE, "up")
    command("ip", "-n", name, "link", "set", "lo", "up")
    command("ip", "-n", name, "address", "add", address, "dev", INTERFACE)
    command("ip", "-n", name, "link", "set", INTERFACE, "up")


def port_name(node: int) -> str:
    """Name of the bridge's end of a node's cable."""
    return f"port{node}"


def limit(prefix: str, node: int, bits_per_second: float | None) -> None:
    """Limit the node's cable in both directions; None takes the limit away."""
    for namespace, device in (
        (node_name(prefix, node), INTERFACE),
        (switch_name(prefix), port_name(node)),
    ):
        with suppress(ShardmarkError):  # there may be none yet
            command("tc", "-n", namespace, "qdisc", "del", "dev", device, "root")
        if bits_per_second is not None:
            burst_bytes = max(LEAST_BURST_BYTES, int(bits_per_second / 8 * BURST_SECONDS))
            command(
                *("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", "tbf"),
                *("rate", f"{int(bits_per_second)}bit", "burst", f"{burst_bytes}b"),
                *("latency", f"{QUEUE_SECONDS * 1000:.0f}ms"),
            )


def counters(prefix: str, node: int) -> dict[str, dict[str, int]]:
    """Bytes since the node was built: interface -> `sent_bytes` and `received_bytes`."""
    links = json.loads(command("ip", "-n", node_name(prefix, node), "-s", "-j", "link", "show"))
    return {
        link["ifname"]: {
            "sent_bytes": link["stats64"]["tx"]["bytes"],
            "received_bytes": link["stats64"]["rx"]["bytes"],
        }
        for link in links
    }


def processes(namespace: str) -> list[int]:
    """Ids of all processes in the namespace."""
    try:
        return [int(pid) for pid in command("ip", "netns", "pids", namespace).split()]
    except ShardmarkError:
        return []  # it is gone already


def kill(namespaces: Iterable[str]) -> None:
    """Kill every process in these namespaces, including those that start meanwhile."""
    names = list(namespaces)
    deadline = time.monotonic() + KILL_SECONDS
    while time.monotonic() < deadline:
        pids = [pid for name in names for pid in processes(name)]
        if not pids:
            return
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def remove(prefix: str) -> None:
    """Kill every process of the bench and delete all its namespaces that exist."""
    names = [path.name for path in _existing(f"{prefix}-")]
    kill(names)
    for name in names:
        with suppress(ShardmarkError):
            command("ip", "netns", "delete", name)


def _existing(beginning: str) -> list[Path]:
    return sorted(NAMESPACES.glob(f"{beginning}*")) if NAMESPACES.is_dir() else []


def guard(prefix: str) -> None:
    """Remove the bench as soon as its builder closes standard input or dies.

    Started before the bench is built.  It ignores signals, so that Ctrl-C in the terminal or a
    SIGKILL of the builder leave nothing behind.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    remove(prefix)


if __name__ == "__main__":
    guard(sys.argv[1])
