"""The engine `torchrun` on two nodes that share no network but one link.

Starting a node costs seconds of loading libraries: one command meets several mishaps, one a trial.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from statistics import median
from typing import Any

import yaml
from benchmarks.cluster import namespaces
from benchmarks.cluster.bench import Bench, bench

from shardmark.base.results.network import read_network
from shardmark.base.results.schema import Outcome, StabilityKind, TrialResult
from shardmark.base.results.store import StoredRun, load_run
from shardmark.bench.analysis.compare.comparison import compare
from shardmark.bench.analysis.diagnose.stability import warnings_of
from tests import present
from tests.cluster.needs import needs_bench
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
    in_order,
    pid_of,
    stepping,
    under_way,
)
from tests.listening import listening
from tests.waiting import wait_for

pytestmark = [
    needs_bench,
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


def wait_for_steps(out: Path, results: int, steps: int) -> None:
    """Until rank 0 of the trial after so many results has taken so many steps."""
    wait_for(lambda: stepping(out, results, ranks=1, steps=steps), 300)


def wait_for_results(out: Path, count: int, seconds: float) -> None:
    wait_for(lambda: len([*(out / "trials").glob("*/result.json")]) >= count, seconds)


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
    records = [read_network(run.path) for run in (one, two)]
    assert [None if record is None else record.world_size for record in records] == [2, 2]
    reaches = [{op.reach for op in record.operations} for record in records if record is not None]
    assert reaches == [{"same_host"}, {"between_hosts"}]
    assert all(op.fit for record in records if record is not None for op in record.operations)
    hosts = {rank.host for rank in by_strategy(two)["ddp"].ranks}
    assert hosts == {"node0", "node1"}
    rows = {row.strategy: row for row in compare([two]).rows}
    nodes_of = {name: row.varied["placement.nodes"] for name, row in rows.items()}
    assert nodes_of == {"single": 1, "ddp": 2, "ps-sync": 2}


FAST = 200e6
SLOW = FAST / 10
DEAD_SLOW = FAST / 200
"""Bits a second: the gradients take 0.084, 0.84 and 17 s."""
STEPS = 22
TRIAL_SECONDS = 30.0
BAD_LINKS: dict[str, Any] = {
    "workload": EXPERIMENT["workload"] | {"model": "tests.cluster.models:heavy"},
    "recipe": EXPERIMENT["recipe"] | {"steps": STEPS},
    "matrix": {"strategy": ["ddp"]},
    "measure": EXPERIMENT["measure"]
    | {"warmup_steps": 2, "evaluate": "never", "probe": False, "link_seconds": 0, "repeats": 4},
    "limits": {"trial_seconds": TRIAL_SECONDS},
}


def test_slow_or_dead_links_end_their_trial_alone(tmp_path: Path) -> None:
    """A command on the node with the later address starts the other over the list of hosts."""
    out = tmp_path / "run"
    with bench(nodes=2, bits_per_second=FAST) as nodes:
        second, first = nodes.nodes
        words = command(
            written(tmp_path, **BAD_LINKS),
            out,
            f"engine.rendezvous={first.address}:0",
            "engine.remote=ip netns exec {host} {command}",
            f"engine.hosts=[{first.namespace},{second.namespace}]",
        )
        started = nodes.start(1, words, log=tmp_path / "log.txt")
        wait_for_steps(out, 0, STEPS // 2)
        nodes.limit(SLOW, nodes=[0])
        wait_for_results(out, 1, 90)
        wait_for_steps(out, 1, 1)
        nodes.limit(DEAD_SLOW, nodes=[0])
        wait_for_results(out, 2, 90)
        nodes.limit(SLOW, nodes=[0])
        wait_for_steps(out, 2, 1)
        nodes.cut(0)  # no reset tells anybody
        wait_for_results(out, 3, NODE_SECONDS + 60)
        assert started.wait(timeout=60) == 1
        wait_for(lambda: not namespaces.processes(second.namespace))
        assert namespaces.processes(first.namespace) == []
    slowed, timed_out, lost, last = in_order(out)
    check_slowed(out, slowed)
    assert timed_out.outcome is Outcome.TIMED_OUT, "in the middle of a collective"
    assert "lost" not in present(timed_out.failure).reason
    check_lost(lost, 1, f"nothing was heard for {NODE_SECONDS} s")
    assert last.outcome is Outcome.UNAVAILABLE, "it needs the node that is gone"


def check_slowed(out: Path, trial: TrialResult) -> None:
    """Gradients filled the link for longer than a silent node has; signs of life got through."""
    assert trial.outcome is Outcome.OK, trial.failure
    lines = map(json.loads, (out / "trials" / trial.id / "steps.jsonl").read_text().splitlines())
    measured = [line for line in lines if line["measured"]]
    for rank in (0, 1):
        seconds = [line["step_seconds"] for line in measured if line["rank"] == rank]
        assert len(seconds) == STEPS - 2
        assert median(seconds[-6:]) > 3 * median(seconds[:6])
        assert sum(seconds[-10:]) > NODE_SECONDS
    warnings = warnings_of(compare([load_run(out, verify=True)]))
    (drift,) = (w for w in warnings if w.kind is StabilityKind.TRIAL_DRIFT)
    assert drift.place == "ddp on 2 ranks, repeat 1"
    assert " longer" in drift.text


def test_death_of_rank_node_or_controller_leaves_no_process(nodes: Bench, tmp_path: Path) -> None:
    """A rank dies in the first trial, node 1 in the second, and the controller in the third."""
    out = tmp_path / "run"
    file = written(tmp_path, **ENDLESS | {"matrix": {"strategy": ["ddp", "fsdp", "zero-1"]}})
    words = command(file, out, f"engine.rendezvous={nodes.nodes[0].address}:{PORT}")
    controller = nodes.start(0, words, log=tmp_path / "0.txt")
    nodes.start(1, words, log=tmp_path / "1.txt")
    wait_for_steps(out, 0, 1)
    for node in nodes.nodes:
        here = {str(address) for address in listening(namespaces.processes(node.namespace))}
        assert node.address in here
        assert here <= {node.address, "127.0.0.1"}
    running = present(under_way(out, 0))
    os.kill(pid_of(running, 1), signal.SIGKILL)
    wait_for_steps(out, 1, 1)
    nodes.kill(1)
    assert controller.wait(timeout=60) == 1, "without node 1 the third trial is unavailable"
    died, lost, missed = in_order(out)
    assert died.outcome is Outcome.FAILED
    assert died.failure is not None
    assert died.failure.reason == "rank 1 was ended by SIGKILL (rank 1 is on node 1, node1)"
    check_lost(lost, 1, "its connection")
    assert missed.outcome is Outcome.UNAVAILABLE
    controller = nodes.start(0, words, log=tmp_path / "0-again.txt")
    other = nodes.start(1, words, log=tmp_path / "1-again.txt")
    wait_for_steps(out, 2, 1)
    nodes.kill(0)
    controller.wait(timeout=60)
    assert other.wait(timeout=60) == 2
    assert "the connection to the controller" in (tmp_path / "1-again.txt").read_text()
    assert not namespaces.processes(nodes.nodes[1].namespace)
