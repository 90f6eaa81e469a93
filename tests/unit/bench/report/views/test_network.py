"""Bytes by formula, collectives, interfaces and ranks: tables, page and figures."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardmark.base.recipe import Recipe
from shardmark.base.results.network import (
    Bounds,
    LinkFit,
    MeasuredOperation,
    NetworkRecord,
    write_network,
)
from shardmark.base.results.schema import (
    CollectiveRecord,
    Phase,
    ProbeRecord,
    RankRecord,
    TrialResult,
)
from shardmark.base.results.store import RunFolder, load_run
from shardmark.base.table.formats import render_csv
from shardmark.base.traffic import ModelSize
from shardmark.bench.analysis.compare.comparison import Comparison
from shardmark.bench.analysis.compare.series import sampled
from shardmark.bench.analysis.network.traffic import TrafficOfRow, traffic_of
from shardmark.bench.analysis.network.wire import WireOfRow, wires_of
from shardmark.bench.report.figures import figures_of
from shardmark.bench.report.page.page import render_page
from shardmark.bench.report.views.network import links_table, network_json, network_tables
from shardmark.ranks.costs import cost_model
from shardmark.ranks.costs.base import Cell
from shardmark.ranks.strategies import build_strategy
from tests import present
from tests.golden.invented import (
    FIRST_STEP_AT_SECONDS,
    compare_trials,
    invented_rank,
    invented_trial,
    store_and_compare,
)

STEPS = 39
"""Measured ones of an invented rank."""
SECONDS = 6.25
"""The windows of an invented rank: 1.25 to 4 and 4.5 to 8 s after its first step."""
Payloads = Mapping[str, int] | None
DDP = {"all_reduce": 4_000_000}
FSDP = {"all_gather": 4_000_000, "reduce_scatter": 4_000_000}
ZERO = {"all_reduce": 4_000_000, "all_gather": 2_000_000}
SERVER = {"send": 4_000_048, "receive": 4_000_000}


def trial(strategy: str, ranks: int, payloads: Payloads, sent: float | None) -> TrialResult:
    """`sent` bytes for each rank and step; a parameter server has a server beside the workers."""
    built = build_strategy(strategy, {})
    size = ModelSize(parameters=1_000_000, trained_parameters=1_000_000)
    collectives = None
    if payloads is not None:
        collectives = {
            kind: CollectiveRecord(calls=1, payload_bytes=size) for kind, size in payloads.items()
        }
    serving: dict[str, Any] = {"role": "server", "probe": None, "windows": ()}
    training = {"probe": ProbeRecord(collectives=collectives)}
    records = tuple(
        invented_rank(number).model_copy(update=training if place.share else serving)
        for number, place in enumerate(built.layout(ranks).ranks)
    )
    metrics = {"network_sent_bytes": None if sent is None else sent * STEPS * ranks}
    made = invented_trial(strategy, ranks, metrics=metrics, ranks=records)
    needed = cost_model(built).required_traffic(
        Cell(size=size, recipe=Recipe(global_batch=8, steps=1), world_size=ranks)
    )
    return made.model_copy(update={"needed_traffic": needed})


def wire(*trials: TrialResult) -> WireOfRow:
    (row,) = wires_of(compare_trials(*trials).rows)
    return row


@pytest.mark.parametrize(
    ("strategy", "payloads", "sent", "defined", "ratios"),
    [
        pytest.param("ddp", DDP, 4.1e6, 4e6, (1.0, 1.025, 1.025), id="a ring"),
        pytest.param("zero-2", ZERO, 6e6, 4e6, (1.5, 1.5, 1.0), id="a library asks for more"),
        pytest.param("fsdp", FSDP, 8e6, 6e6, (1.0, 8 / 6, 8 / 6), id="a backend sends more"),
        pytest.param("ps-sync", SERVER, 8e6, 8e6, (1.0, 1.0, 1.0), id="answers count for workers"),
    ],
)
def test_formula_and_measured_bytes_agree(
    strategy: str, payloads: Payloads, sent: float, defined: float, ratios: tuple[float, ...]
) -> None:
    comparison = compare_trials(trial(strategy, 2, payloads, sent))
    (row,) = wires_of(comparison.rows)
    assert row.defined_bytes == pytest.approx(defined)
    (line,) = network_json(network_tables(comparison))["bytes"]
    measured = [line[f"{name}_ratio"] for name in ("collective", "interface", "backend")]
    assert measured == pytest.approx(ratios, abs=1e-4)
    assert not row.missing


def test_unknown_bytes_are_null_with_a_reason() -> None:
    """A probe that counted nothing; a model that was never counted."""
    row = wire(trial("fsdp", 2, None, 8e6))
    assert row.defined_bytes == pytest.approx(6e6)
    assert (row.counted_bytes, set(row.missing)) == (None, {"counted"})
    (line,) = network_json(network_tables(compare_trials(invented_trial("ddp", 2))))["bytes"]
    assert (line["formula_bytes"], line["collective_ratio"]) == (None, None)
    assert "parameters" in line["missing"]["formula_bytes"]


def test_the_table_of_bytes() -> None:
    alone = trial("single", 1, {}, 0.0)
    table = network_tables(
        compare_trials(alone, trial("ddp", 2, DDP, 4.1e6), trial("fsdp", 2, FSDP, None))
    )[0]
    for key, cells in (
        ("label", ("ddp", "fsdp")),
        ("formula_bytes", ("4.00", "6.00")),
        ("collective_ratio", ("1.00", "1.00")),
        ("interface_bytes", ("4.10", "-")),
        ("interface_ratio", ("1.02", "-")),
    ):
        assert table.cells(key) == cells
    notes = " ".join(table.notes)
    assert "ddp: all-reduce: 2 (n-1)/n G." in notes
    assert "interfaces: not recorded (fsdp on 2 ranks)" in notes
    assert "PCIe" not in notes
    empty = network_tables(compare_trials(alone))[0]
    assert (empty.rows, empty.notes[0]) == ((), "No trial of several ranks ended ok.")
    on_gpus = trial("ddp", 2, DDP, 4.1e6)
    on_gpus = on_gpus.model_copy(update={"trial": {**on_gpus.trial, "device_type": "cuda"}})
    notes = " ".join(network_tables(compare_trials(on_gpus))[0].notes)
    assert all(word in notes for word in ("PCIe", "shared memory", "NVLink", "InfiniBand"))


# Samples over time

Counts = Mapping[str, tuple[float, float]]
"""Bytes a second that are sent and received, by interface."""
TIMES = [number / 4 for number in range(-2, 36)]
NODES: Sequence[Counts] = (
    {"lo": (390.0, 390.0), "eth0": (3900.0, 780.0), "idle": (0.0, 0.01)},
    {"lo": (0.0, 0.0), "eth0": (780.0, 3900.0)},
)


RANKS = ((0, 1), (2,))
"""Ranks of each node."""


def sample(seconds: float, network: Counts, node: int = 0) -> dict[str, Any]:
    counters = {
        name: {"bytes_sent": 1e9 + seconds * sent, "bytes_received": seconds * received}
        for name, (sent, received) in network.items()
    }
    at = {"node": node, "at_seconds": FIRST_STEP_AT_SECONDS + seconds, "gpus": []}
    ranks = [{"rank": rank, "pid": 4000 + rank, "cpu_seconds": seconds} for rank in RANKS[node]]
    return at | {"ranks": ranks, "network": counters}


def later(rank: RankRecord, seconds: float) -> RankRecord:
    windows = tuple(
        window.model_copy(update={"started_at_seconds": window.started_at_seconds + seconds})
        for window in rank.windows
    )
    began = (rank.first_step_at_seconds or 0.0) + seconds
    return rank.model_copy(update={"windows": windows, "first_step_at_seconds": began})


def two_nodes(folder: Path, *, ahead_seconds: float = 0.0) -> Comparison:
    """A trial of three ranks: two on the first node, which sends, and one on the second.

    The second node's clock may be ahead.
    """
    placed = tuple(
        later(invented_rank(number), node * ahead_seconds).model_copy(update={"node": node})
        for number, node in enumerate((0, 0, 1))
    )
    made = invented_trial("ddp", 3, ranks=placed)
    made = made.model_copy(update={"trial": {**made.trial, "nodes": 2}})
    lines = [sample(at, NODES[node], node) for at in TIMES for node in (1, 0)]
    for line in lines:
        line["at_seconds"] += line["node"] * ahead_seconds
    return store_and_compare(folder, [made], samples=lambda _: lines)


def on_loopback(
    folder: Path, times: Sequence[float], sent: Callable[[float], float]
) -> tuple[Comparison, TrafficOfRow]:
    """Two ranks on one node; `sent` tells the bytes by then."""
    lines = [sample(at, {}) for at in times]
    for at, line in zip(times, lines, strict=True):
        line["network"] = {"lo": {"bytes_sent": sent(at), "bytes_received": 0}}
    comparison = store_and_compare(folder, [invented_trial("ddp", 2)], samples=lambda _: lines)
    return comparison, traffic_of(comparison.rows[0])


@pytest.fixture
def nodes(tmp_path: Path) -> Comparison:
    return two_nodes(tmp_path / "two")


def test_interfaces_of_several_nodes_are_separate_rows(nodes: Comparison) -> None:
    traffic = traffic_of(nodes.rows[0])
    assert not traffic.missing
    interfaces = [(each.node, each.name) for each in traffic.interfaces]
    assert interfaces == [(0, "eth0"), (0, "lo"), (1, "eth0")]
    first = traffic.interfaces[0]
    assert present(first.sent.step_bytes).value == pytest.approx(3900 * SECONDS / STEPS)
    assert first.received.mean_bytes_per_second == pytest.approx(780)
    assert first.sent.peak_bytes_per_second == pytest.approx(3900)
    assert first.sent.over_time.y == pytest.approx([3900] * len(first.sent.over_time.x))
    assert (min(first.sent.over_time.x), max(first.sent.over_time.x)) == (0.125, 7.875)
    no_folder = traffic_of(replace(nodes.rows[0], folder=None))
    assert set(no_folder.missing) == {"interfaces"}


def test_bursts_have_a_peak(tmp_path: Path) -> None:
    """The windows send all of their bytes within half a second."""
    _, traffic = on_loopback(tmp_path, TIMES, lambda at: 1000 * min(max(at - 2, 0), 0.5))
    (each,) = traffic.interfaces
    assert each.sent.mean_bytes_per_second == pytest.approx(500 / SECONDS)
    assert each.sent.peak_bytes_per_second == pytest.approx(1000)


def test_errors_of_interfaces_are_counted_and_drawn(tmp_path: Path) -> None:
    lines = [sample(at, {}) for at in TIMES]
    for at, line in zip(TIMES, lines, strict=True):
        line["network"] = {"lo": {"bytes_sent": 9 * at + 9, "bytes_received": 0, "errors": 4 * at}}
    run = store_and_compare(tmp_path, [invented_trial("ddp", 2)], samples=lambda _: lines)
    (each,) = traffic_of(run.rows[0]).interfaces
    assert each.errors.mean_bytes_per_second == pytest.approx(4)
    (panel,) = {figure.name: figure for figure in figures_of(run)}["network-errors"].panels
    assert panel.y_label == "Lost or dropped (packets/s)"
    assert panel.series[0].y == pytest.approx([4] * len(panel.series[0].x))
    comparison, _ = on_loopback(tmp_path / "old", TIMES, lambda at: 9 * at + 9)
    assert "network-errors" not in {figure.name for figure in figures_of(comparison)}


def test_few_samples_give_no_peak_and_an_early_end_no_bytes(tmp_path: Path) -> None:
    """Every second, seven in the windows: the mean is known, a peak is not."""
    seconds = [float(at) for at in range(-1, 10)]
    comparison, traffic = on_loopback(tmp_path / "few", seconds, lambda at: 9 * at + 9)
    (each,) = traffic.interfaces
    assert each.sent.mean_bytes_per_second == pytest.approx(9)
    assert each.sent.peak_bytes_per_second is None
    notes = " ".join(note for table in network_tables(comparison) for note in table.notes)
    assert "Peak left out: at most 7 samples" in notes
    _, ended = on_loopback(tmp_path / "early", [at for at in TIMES if at < 3], lambda at: 9 * at)
    assert ended.missing["interfaces"] == "no sample was taken after the last window"


def test_a_node_s_clock_may_be_wrong(tmp_path: Path) -> None:
    """The node's samples are cut to the windows of its ranks, which the same clock timed."""
    traffic = traffic_of(two_nodes(tmp_path / "two", ahead_seconds=1000.0).rows[0])
    assert not traffic.missing
    second = traffic.interfaces[2]
    assert second.received.mean_bytes_per_second == pytest.approx(3900)
    assert min(second.sent.over_time.x) == pytest.approx(0.125)


def test_a_sum_over_nodes_is_no_difference_between_them(nodes: Comparison) -> None:
    """The figure of network and CPU: counters of two nodes have nothing to do with each other."""
    curves = sampled(nodes.rows[0])
    assert {round(value) for value in curves["network_bytes_per_second"].y} == {3900 + 390 + 780}
    assert {round(value) for value in curves["cpu_percent"].y} == {300}


def test_tables_figure_and_page(nodes: Comparison, tmp_path: Path) -> None:
    write_network(tmp_path / "two", record())
    tables = network_tables(nodes)
    _, collectives, interfaces, links = tables
    assert links.title == "Links between 2 ranks, gloo"
    assert collectives.cells("counted_calls") == ("2",)
    assert collectives.cells("counted_payload_bytes") == ("44.70",)
    assert interfaces.cells("interface") == ("eth0", "lo", "eth0")
    document = network_json(tables)
    json.dumps(document, allow_nan=False)
    numbers = {key: len(lines) for key, lines in document.items()}
    keys = ("bytes", "collectives", "collectives_by_phase", "interfaces", "links")
    assert numbers == dict(zip(keys, (1, 1, 0, 3, 0), strict=True))
    assert len(document["interfaces"][0]["sent_over_time"]["seconds"]) == 32
    lines = csv.DictReader(io.StringIO(render_csv(tables)))
    received = [line["received_mean_bytes_per_second"] for line in lines]
    assert [float(value) for value in received if value][2] == pytest.approx(3900)
    (panel,) = {figure.name: figure for figure in figures_of(nodes)}["bandwidth"].panels
    smooth = [each for each in panel.series if not each.raw]
    assert [each.name for each in smooth] == ["node 0, eth0", "node 0, lo", "node 1, eth0"]
    page = render_page([load_run(tmp_path / "two")], nodes, (), None)
    assert 'id="network"' in page
    assert links.title in page


def test_collectives_by_phase_confirm_or_deny_a_pattern() -> None:
    """Means over ranks: one of the two gathers twice as much; old results have no such table."""

    def phases(scale: int) -> dict[Phase, dict[str, CollectiveRecord]]:
        gather = CollectiveRecord(calls=2, payload_bytes=scale * 10**6)
        return {
            "update": {"all_gather": gather},
            "backward": {"all_reduce": CollectiveRecord(calls=1, payload_bytes=4_000_000)},
        }

    made = trial("zero-1", 2, ZERO, None)
    ranks = tuple(
        rank.model_copy(
            update={"probe": ProbeRecord(collectives={}, collectives_by_phase=phases(scale))}
        )
        for rank, scale in zip(made.ranks, (1, 2), strict=True)
    )
    tables = network_tables(compare_trials(made.model_copy(update={"ranks": ranks})))
    table = next(table for table in tables if table.title == "Collectives by phase")
    assert table.cells("phase") == ("backward", "update"), "in the order of the step"
    assert table.cells("kind") == ("all reduce", "all gather")
    assert table.cells("counted_payload_bytes") == ("4.00", "1.50")
    lines = network_json(tables)["collectives_by_phase"]
    assert [line["counted_calls"] for line in lines] == [1, 2]
    titles = [table.title for table in network_tables(compare_trials(made))]
    assert "Collectives by phase" not in titles


@pytest.mark.parametrize(
    ("low", "high", "noisy"), [(4e7, 1.7e8, True), (5e7, 1.9e8, False), (None, None, True)]
)
def test_uncertain_bandwidths_are_marked(
    low: float | None, high: float | None, noisy: bool
) -> None:
    fit = LinkFit(
        latency_seconds=Bounds(value=1e-4, low=None, high=None),
        bytes_per_second=Bounds(value=1e8, low=low, high=high),
        residual=0.1,
    )
    operation = MeasuredOperation(
        operation="all_reduce", reach="between_hosts", ranks=(0, 1), sizes=(), fit=fit
    )
    (cell,) = links_table(record(operation)).cells("bytes_per_second")
    assert ("too noisy" in cell) is noisy


def test_missing_links_have_a_reason(nodes: Comparison, tmp_path: Path) -> None:
    assert "doctor --network" in network_tables(nodes)[-1].notes[0]
    RunFolder(tmp_path / "two").write_environment({"links_missing": "timed_out: no end"})
    assert network_tables(nodes)[-1].notes == ("Links could not be measured: timed_out: no end.",)
    (tmp_path / "two" / "network.json").write_text("{")
    (note,) = network_tables(nodes)[-1].notes
    assert "network.json" in note
    assert "measure again" in note


def record(*operations: MeasuredOperation) -> NetworkRecord:
    return NetworkRecord(
        measured_at_seconds=1.0,
        backend="gloo",
        device_type="cpu",
        hosts=("a", "b"),
        interface=None,
        torch="2.15",
        operations=operations,
    )
