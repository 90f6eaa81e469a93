"""The engine `torchrun` on two nodes that share no network but one link."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from benchmarks.cluster import namespaces

from shardmark.analysis.compare.comparison import compare
from shardmark.measure.step.progress import reached
from shardmark.results.network import read_network
from shardmark.results.store import StoredRun, load_run
from tests.cluster.needs import why_no_bench
from tests.cluster.one_machine import (
    ENDLESS,
    EXPERIMENT,
    by_strategy,
    check_lost,
    check_places,
    check_same,
    check_samples,
    check_verdicts,
    given,
    wait_for,
)
from tests.listening import listening

if TYPE_CHECKING:
    from benchmarks.cluster.bench import Bench

pytestmark = [
    pytest.mark.skipif(why_no_bench() is not None, reason=why_no_bench() or ""),
    pytest.mark.timeout(900),
]

NODE_SECONDS = 6
PORT = 29417


def written(folder: Path, **changes: Any) -> Path:
    """An experiment on two nodes, as a file."""
    path = folder / "experiment.yaml"
    content = EXPERIMENT | {"placement": {"nodes": 2}} | changes
    path.write_text(yaml.safe_dump(content))
    return path


def command(experiment: Path, out: Path, *settings: str) -> list[str]:
    """The same on every node; the network interface is to be found, not to be told."""
    unset = ["env", "-u", "GLOO_SOCKET_IFNAME", "-u", "NCCL_SOCKET_IFNAME"]
    words = [*unset, sys.executable, "-m", "shardmark", "run", str(experiment), "--out", str(out)]
    words += ["--engine", "torchrun", "--set", f"engine.node_seconds={NODE_SECONDS}"]
    return words + given(*settings)


def steps(out: Path, rank: int) -> int:
    """Steps of a trial under way, as the controller's folder has them."""
    found = (reached(one, rank) for one in (out / "trials").glob("*"))
    return max((one.steps for one in found if one is not None), default=0)


def test_two_nodes_train_what_one_machine_trains(
    nodes: Bench, tmp_path: Path, one: StoredRun
) -> None:
    """The same command on both; the same files, losses equal to the last bit, ranks in place."""
    out = tmp_path / "two"
    rendezvous = f"engine.rendezvous={nodes.nodes[0].address}:{PORT}"
    words = command(written(tmp_path), out, rendezvous, "measure.verify=true")
    codes = nodes.run_everywhere(lambda _: words, seconds=600, logs=tmp_path)
    assert codes == [0, 0], (tmp_path / "node0.log").read_text()[-2000:]
    two = load_run(out, verify=True)
    check_same(one, two)
    check_verdicts(two)
    check_places(two)
    for own in check_samples(two).values():  # the gradients have gone over each node's link
        sent = [line["network"][namespaces.INTERFACE]["bytes_sent"] for line in own]
        assert sent[-1] - sent[0] > 6 * 9000 * 4  # parameters x steps x bytes
    _check_links(one, two)
    hosts = {rank.host for rank in by_strategy(two)["ddp"].ranks}
    assert hosts == {"node0", "node1"}
    rows = {row.strategy: row for row in compare([two]).rows}
    assert {name: row.varied["placement.nodes"] for name, row in rows.items()} == {
        "single": 1,
        "ddp": 2,
        "ps-sync": 2,
    }
    assert rows["ddp"].metrics["speedup"] is not None


def _check_links(one: StoredRun, two: StoredRun) -> None:
    """Measured between the ranks of each run before its trials."""
    found = [read_network(run.path) for run in (one, two)]
    assert [None if record is None else record.world_size for record in found] == [2, 2]
    reaches = [{op.reach for op in record.operations} for record in found if record is not None]
    assert reaches == [{"same_host"}, {"between_hosts"}]
    assert all(op.fit for record in found if record is not None for op in record.operations)


def started_from(node: int, nodes: Bench, tmp_path: Path) -> subprocess.Popen[bytes]:
    """One command there, which starts the other node over the list of hosts."""
    first, second = nodes.nodes[node], nodes.nodes[1 - node]
    words = command(
        written(tmp_path, **ENDLESS),
        tmp_path / "run",
        f"engine.rendezvous={first.address}:0",
        "engine.remote=ip netns exec {host} {command}",
        f"engine.hosts=[{first.namespace},{second.namespace}]",
    )
    return nodes.start(node, words, log=tmp_path / "log.txt")


def test_dead_link_ends_the_trial_in_time(nodes: Bench, tmp_path: Path) -> None:
    """No reset tells anybody.  Node 0 is the one with the later address, and rank 0 is there."""
    out = tmp_path / "run"
    started = started_from(1, nodes, tmp_path)
    wait_for(lambda: min(steps(out, 0), steps(out, 1)) > 3, 300)
    nodes.cut(0)
    results = out / "trials"
    took = wait_for(lambda: any(results.glob("*/result.json")), NODE_SECONDS + 20)
    assert took < NODE_SECONDS + 8, "the stated time, and that of ending what is left"
    started.wait(timeout=60)
    check_lost(out, 1, f"nothing was heard for {NODE_SECONDS} s")
    assert started.returncode == 1
    wait_for(lambda: not namespaces.processes(nodes.nodes[0].namespace), NODE_SECONDS + 8)


def test_dead_controller_ends_the_nodes(nodes: Bench, tmp_path: Path) -> None:
    out = tmp_path / "run"
    started = started_from(0, nodes, tmp_path)
    wait_for(lambda: min(steps(out, 0), steps(out, 1)) > 3, 300)
    for node in nodes.nodes:
        here = {str(address) for address in listening(namespaces.processes(node.namespace))}
        assert node.address in here
        assert here <= {node.address, "127.0.0.1"}
    nodes.kill(0)
    wait_for(lambda: not namespaces.processes(nodes.nodes[1].namespace), 15)
    started.wait(timeout=10)
