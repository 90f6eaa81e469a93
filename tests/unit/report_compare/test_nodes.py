"""Metrics of one node: its own ranks, samples and interfaces, and no others'."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from shardmark.analysis.compare.comparison import compare
from shardmark.cli import main
from shardmark.core.run_files import SAMPLES_FILE, STEPS_FILE
from shardmark.report.table.formats import records
from shardmark.report.views.per_node import LINK_METRICS, NODE_METRICS, nodes_tables
from shardmark.results.schema import RankRecord, TrialResult, WindowRecord
from shardmark.results.store import RunFolder, load_run
from tests.golden.invented import EXPERIMENT, STARTED_AT_SECONDS, invented_rank, invented_trial

WINDOW_SECONDS = 10.0
CLOCK_AHEAD_SECONDS = 500.0
"""Of node 1: its windows and its samples have its own time."""
STEP_SECONDS = {0: 0.1, 1: 0.2, 2: 0.3, 3: 0.4}
MEMORY_BYTES = {0: 100, 1: 200, 2: 400, 3: 300}


def began_at(node: int) -> float:
    return STARTED_AT_SECONDS + 5 + node * CLOCK_AHEAD_SECONDS


def rank_of(number: int, *, role: str = "worker", node: int | None = None) -> RankRecord:
    """Ranks 0 and 1 on node 0, 2 and 3 on node 1, each with one window."""
    node = number // 2 if node is None else node
    window = WindowRecord(
        first_step=2, end_step=4, started_at_seconds=began_at(node), window_seconds=WINDOW_SECONDS
    )
    return invented_rank(number).model_copy(
        update={
            "node": node,
            "role": role,
            "local_rank": number % 2,
            "host": f"node{node}",
            "windows": (window,) if role == "worker" else (),
            "samples": 100 * (number + 1),
            "peak_memory_bytes": MEMORY_BYTES.get(number, 50),
            "skipped_steps": 3 if number == 3 else 0,
        }
    )


def sample(node: int, after_seconds: float, ranks: tuple[int, ...]) -> dict[str, object]:
    """Counters grow by the second: CPU by rank, and bytes by node; the loopback by much more."""
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
        "network": {
            "lo": {"bytes_sent": 9e6 * after_seconds, "bytes_received": 9e6 * after_seconds},
            "eth0": {"bytes_sent": sent, "bytes_received": 2 * sent},
        },
        "gpus": [],
    }


def written(
    folder: Path, *trials: TrialResult, samples: Sequence[dict[str, object]] | None = ()
) -> Path:
    """A run of these trials; without raw files where the samples are None."""
    run = RunFolder.create(folder)
    run.write_experiment(EXPERIMENT)
    run.write_environment({})
    for trial in trials:
        place = run.create_trial(trial.id)
        if samples is None:
            run.write_result(trial)
            continue
        steps = [
            {"rank": rank.rank, "step": step, "measured": step >= 2, "step_seconds": seconds}
            for rank in trial.ranks
            for step in range(4)
            if (seconds := STEP_SECONDS.get(rank.rank, 1.0))
        ]
        for name, lines in ((STEPS_FILE, steps), (SAMPLES_FILE, samples)):
            text = "".join(f"{json.dumps(line)}\n" for line in lines)
            (place / name).write_text(f"{text}no line\n[]\n{{}}\n")
        run.write_result(trial)
    return folder


@pytest.fixture
def two_nodes(tmp_path: Path) -> Path:
    ranks = tuple(map(rank_of, range(4)))
    trial = invented_trial("fsdp", 4, varied={"placement.nodes": 2}, ranks=ranks)
    samples = [
        sample(node, after, (2 * node, 2 * node + 1)) for after in (-1, 4, 11) for node in (0, 1)
    ]
    return written(tmp_path / "run", trial, samples=samples)


def lines_of(folder: Path) -> list[dict[str, Any]]:
    """Node by node, as programs get them."""
    (table,) = nodes_tables(compare([load_run(folder)]))
    return records(table)


def value(line: dict[str, Any], name: str) -> float:
    assert line[name] is not None, line["missing"]
    return float(line[name]["value"])


def test_each_node_has_the_numbers_of_its_own_ranks(two_nodes: Path) -> None:
    first, second = lines_of(two_nodes)
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
        "network_sent_bytes": (1e8, 1.1e8),
        "link_sent_bytes_per_second": (1e6, 2e6),
        "link_received_bytes_per_second": (2e6, 4e6),
    }
    for name, numbers in expected.items():
        assert (value(first, name), value(second, name)) == pytest.approx(numbers), name
    assert second["gpu_utilization"] is None
    assert second["missing"]["gpu_utilization"] == "the device is a CPU"
    assert {*NODE_METRICS, *LINK_METRICS} <= first.keys()
    assert first[LINK_METRICS[0]]["unit"] == "bytes/s"


def test_a_node_of_servers_alone_is_timed_by_the_workers(tmp_path: Path) -> None:
    """It trains nothing, and its processes and its link are seen all the same."""
    ranks = (rank_of(0, node=0), rank_of(1, role="server", node=1))
    trial = invented_trial("ps-sync", 1, varied={"placement.nodes": 2}, ranks=ranks)
    one = sample(0, -1, (0,)), sample(0, 11, (0,))
    other = [sample(1, after, (1,)) for after in (-1, 11)]
    for line in other:  # its clock agrees with node 0's
        line["at_seconds"] = float(str(line["at_seconds"])) - CLOCK_AHEAD_SECONDS
    workers, servers = lines_of(written(tmp_path / "run", trial, samples=[*one, *other]))
    assert (workers["servers"], servers["servers"]) == (0, 1)
    assert servers["samples_per_second"] is None
    assert value(servers, "threads") == 5
    assert value(servers, "link_sent_bytes_per_second") == pytest.approx(2e6)


def test_one_node_and_results_without_files(tmp_path: Path) -> None:
    """Older samples name no node; what is not on file has its reason."""
    trial = invented_trial("ddp", 2, ranks=tuple(rank_of(rank) for rank in (0, 1)))
    samples = [sample(0, after, (0, 1)) for after in (-1, 11)]
    for line in samples:
        del line["node"]
        line["network"] = {"lo": {"bytes_sent": 1, "bytes_received": 1}}
    (only,) = lines_of(written(tmp_path / "run", trial, samples=samples))
    assert value(only, "threads") == 5
    assert only["missing"][LINK_METRICS[0]] == "the node has no interface but its loopback"
    (bare,) = lines_of(written(tmp_path / "bare", trial, samples=None))
    assert value(bare, "peak_memory_bytes") == 200
    assert bare["missing"]["threads"] == "rank 0: no sample was taken"
    assert bare["missing"]["step_seconds"] == "rank 0 marked no step span"


def test_the_table_and_the_command(
    two_nodes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (table,) = nodes_tables(compare([load_run(two_nodes)]))
    columns = {column.key for column in table.for_people()[0]}
    assert {"placement.nodes", "node"} <= columns
    assert "gpu_utilization" not in columns
    assert table.cells("link_sent_bytes_per_second") == ("1.00", "2.00")
    assert table.cells("errors") == ("-", "3")
    for form in ("text", "json"):
        assert main(["compare", str(two_nodes), "--nodes", "--format", form]) == 0
        assert "node1" in capsys.readouterr().out
    (empty,) = nodes_tables(compare([load_run(written(tmp_path / "empty"))]))
    assert (empty.rows, empty.notes) == ((), ("No trial ended ok.",))
