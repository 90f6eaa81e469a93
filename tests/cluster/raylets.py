"""A Ray cluster on this machine, in a process of its own; as a program, that process.

It says where the cluster is and which process its head's raylet is, kills the raylet whose process
is named on standard input, and takes everything down when that ends.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

STORE_BYTES = 80 * 2**20
"""Ray refuses less than 75 MB."""

VARIABLES = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_prestart_worker_first_driver": "0",  # a process that nobody will use takes seconds
    "RAY_enable_worker_prestart": "0",
}


def why_no_ray() -> str | None:
    """Why there can be no Ray cluster; None if there can."""
    if find_spec("ray") is None:
        return "ray is not installed: pip install 'shardmark[ray]'"
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Raylets:
    """A cluster that is up."""

    address: str
    head: int
    """The process of the head's raylet, by which drivers are in the cluster."""
    process: subprocess.Popen[str]

    def kill(self, pid: int) -> None:
        """End a raylet as a crash would."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{pid}\n")
        self.process.stdin.flush()


@contextmanager
def raylets(nodes: int, *, cpus: int, log: Path, **variables: str) -> Iterator[Raylets]:
    """Nodes with so many cores each, the head among them; their processes have the variables."""
    words = [sys.executable, "-m", "tests.cluster.raylets", str(nodes), str(cpus)]
    with log.open("w") as written:
        process = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=written,
            text=True,
            cwd=Path(__file__).parents[2],
            env=os.environ | VARIABLES | variables,
            start_new_session=True,
        )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        told = process.stdout.readline().split()
        assert told, log.read_text()
        yield Raylets(address=told[0], head=int(told[1]), process=process)
    finally:
        process.stdin.close()
        process.wait(timeout=60)
        process.stdout.close()


def main(nodes: int, cpus: int) -> None:
    from ray.cluster_utils import Cluster

    given: dict[str, Any] = {"num_cpus": cpus, "object_store_memory": STORE_BYTES}
    alone = {"include_dashboard": False, "include_log_monitor": False, "no_monitor": True}
    cluster: Any = Cluster(initialize_head=True, head_node_args=given | alone)
    for _ in range(nodes - 1):
        cluster.add_node(wait=False, include_log_monitor=False, **given)
    cluster.wait_for_nodes(timeout=200)
    print(cluster.address, _raylet(cluster.head_node), flush=True)
    for line in sys.stdin:
        (node,) = (one for one in cluster.worker_nodes if _raylet(one) == int(line))
        cluster.remove_node(node, allow_graceful=False)
    session = cluster.head_node.get_session_dir_path()
    cluster.shutdown()
    shutil.rmtree(session, ignore_errors=True)


def _raylet(node: Any) -> int:
    return int(node.all_processes["raylet"][0].process.pid)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
