"""Metrics of one node: its own ranks and samples, and no others'."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from shardmark.analysis.compare.comparison import compare
from shardmark.report.table.formats import records
from shardmark.report.views.nodes import NODE_METRICS, nodes_tables
from shardmark.results.schema import RankRecord, TrialResult, WindowRecord
from shardmark.results.store import load_run
from tests.golden.invented import STARTED_AT_SECONDS, invented_rank, invented_trial, write_run

CLOCK_AHEAD_SECONDS = 500.0
"""Of node 1: its windows and its samples have its own time."""
STEP_SECONDS = (0.1, 0.2, 0.3, 0.4)
MEMORY_BYTES = (100, 200, 400, 300)


def began_at(node: int) -> float:
    return STARTED_AT_SECONDS + 5 + node * CLOCK_AHEAD_SECONDS


def rank_of(number: int, *, role: str = "worker", node: int | None = None) -> RankRecord:
    """Ranks 0 and 1 on node 0, 2 and 3 on node 1, each with one window of ten seconds."""
    node = number // 2 if node is None else node
    window = WindowRecord(
        first_step=2, end_step=4, started_at_seconds=began_at(node), window_seconds=10.0
    )
    return invented_rank(number).model_copy(
        update={
            "node": node,
            "role": role,
            "local_rank": number % 2,
            "host": f"node{node}",
            "windows": (window,) if role == "worker" else (),
            "samples": 100 * (number + 1),
            "peak_memory_bytes": MEMORY_BYTES[number],
            "skipped_steps": 3 if number == 3 else 0,
        }
    )


def sample(node: int, after_seconds: float, ranks: Iterable[int]) -> dict[str, Any]:
    """Counters grow by the second: CPU by rank, and bytes by node."""
    processes = [
        {
            "rank": rank,
            "pid": 4000 + rank,
            "cpu_seconds": 0.25 * (rank + 1) * after_seconds,
            "rss_bytes": 1000 * (rank + 1),
            "threads": 4 + rank,
            "processes": 1,
            "open_files": 10,
            "context_switches": 10 * after_seconds,
        }
        for rank in ranks
    ]
    sent = (node + 1) * 1e6 * after_seconds
    return {
        "node": node,
        "at_seconds": began_at(node) + after_seconds,
        "ranks": processes,
        "network": {"eth0": {"bytes_sent": sent, "bytes_received": 2 * sent}},
        "gpus": [],
    }


def lines_of(
    folder: Path, trial: TrialResult, samples: Sequence[dict[str, Any]], *, steps: bool = True
) -> list[dict[str, Any]]:
    """Node by node, as programs get them."""
    taken = [
        {"rank": rank.rank, "step": step, "measured": step >= 2, "step_seconds": seconds}
        for rank, seconds in zip(trial.ranks, STEP_SECONDS, strict=False)
        for step in range(4 if steps else 0)
    ]
    write_run(folder, [trial], steps=lambda _: [*taken, {}], samples=lambda _: [*samples, {}])
    (table,) = nodes_tables(compare([load_run(folder)]))
    return records(table)


def two_nodes(folder: Path) -> list[dict[str, Any]]:
    ranks = tuple(map(rank_of, range(4)))
    trial = invented_trial("fsdp", 4, varied={"placement.nodes": 2}, ranks=ranks)
    samples = [
        sample(node, after, (2 * node, 2 * node + 1)) for after in (-1, 4, 11) for node in (0, 1)
    ]
    return lines_of(folder, trial, samples)


def value(line: dict[str, Any], name: str) -> float:
    assert line[name] is not None, line["missing"]
    return float(line[name]["value"])


def test_each_node_has_the_numbers_of_its_own_ranks(tmp_path: Path) -> None:
    first, second = two_nodes(tmp_path / "run")
    assert [(line["node"], line["hosts"], line["ranks"]) for line in (first, second)] == [
        (0, "node0", [0, 1]),
        (1, "node1", [2, 3]),
    ]
    expected = {
        "samples_per_second": (30.0, 70.0),
        "step_seconds": (0.2, 0.4),
        "peak_memory_bytes": (200, 400),
        "skipped_steps": (0, 3),
        "cpu_percent": (37.5, 87.5),
        "peak_rss_bytes": (2000, 4000),
        "threads": (5, 7),
        "processes": (2, 2),
        "context_switches": (200, 200),
        "network_sent_bytes": (1e7, 2e7),
    }
    for name, numbers in expected.items():
        assert (value(first, name), value(second, name)) == pytest.approx(numbers), name
    assert second["gpu_utilization"] is None
    assert second["missing"]["gpu_utilization"] == "the device is a CPU"
    assert first.keys() >= {*NODE_METRICS}


def test_a_node_of_servers_alone_is_timed_by_the_workers(tmp_path: Path) -> None:
    """It trains nothing, and its processes and its network are seen all the same."""
    ranks = (rank_of(0, node=0), rank_of(1, role="server", node=1))
    trial = invented_trial("ps-sync", 1, varied={"placement.nodes": 2}, ranks=ranks)
    samples = [sample(node, after, (node,)) for after in (-1, 11) for node in (0, 1)]
    for line in samples:  # the clocks agree
        line["at_seconds"] -= line["node"] * CLOCK_AHEAD_SECONDS
    workers, servers = lines_of(tmp_path / "run", trial, samples)
    assert (workers["servers"], servers["servers"]) == (0, 1)
    assert servers["samples_per_second"] is None
    assert value(servers, "threads") == 5
    assert value(servers, "network_sent_bytes") == pytest.approx(2e7)


def test_one_node_and_results_without_samples(tmp_path: Path) -> None:
    """Samples of one node do not name it; what is not on file has its reason."""
    trial = invented_trial("ddp", 2, ranks=tuple(map(rank_of, (0, 1))))
    samples = [sample(0, after, (0, 1)) for after in (-1, 11)]
    for line in samples:
        del line["node"]
    (only,) = lines_of(tmp_path / "run", trial, samples)
    assert value(only, "threads") == 5
    (bare,) = lines_of(tmp_path / "bare", trial, [], steps=False)
    assert value(bare, "peak_memory_bytes") == 200
    assert bare["missing"]["threads"] == "rank 0: no sample was taken"
    assert bare["missing"]["step_seconds"] == "rank 0 marked no step span"


def test_the_table(tmp_path: Path) -> None:
    two_nodes(tmp_path / "run")
    (table,) = nodes_tables(compare([load_run(tmp_path / "run")]))
    columns = {column.key for column in table.for_people()[0]}
    assert {"placement.nodes", "node"} <= columns
    assert "gpu_utilization" not in columns
    (empty,) = nodes_tables(compare([load_run(write_run(tmp_path / "empty", []))]))
    assert (empty.rows, empty.notes) == ((), ("No trial ended ok.",))
