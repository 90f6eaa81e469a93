"""A Ray cluster on this machine, in a process of its own; as a program, that process.

It says where the cluster is, and takes everything down when its standard input ends.
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
    """Say why there can be no Ray cluster; None if there can."""
    if find_spec("ray") is None:
        return "ray is not installed: pip install 'shardmark[ray]'"
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Raylets:
    """A cluster that is up."""

    address: str
    process: subprocess.Popen[str]


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
        address = process.stdout.readline().strip()
        assert address, log.read_text()
        yield Raylets(address=address, process=process)
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
    print(cluster.address, flush=True)
    sys.stdin.read()
    session = cluster.head_node.get_session_dir_path()
    cluster.shutdown()
    shutil.rmtree(session, ignore_errors=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
