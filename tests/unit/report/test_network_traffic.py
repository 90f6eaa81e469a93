"""Interfaces over time, from samples to `compare --network`, the page and the figures."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.golden.invented import invented_rank, invented_trial, write_run
from tests.unit.figures.runs import FIRST_STEP_AT_SECONDS, comparison_of

from shardmark import cli
from shardmark.analysis.compare.comparison import Comparison, compare
from shardmark.analysis.compare.series import sampled
from shardmark.analysis.network.traffic import TrafficOfRow, traffic_of
from shardmark.report.figures import figures_of
from shardmark.report.page.page import write_report
from shardmark.report.table.formats import render_csv
from shardmark.report.views.network import links_table, network_json, network_tables
from shardmark.results.network import (
    Bounds,
    LinkFit,
    MeasuredOperation,
    NetworkRecord,
    write_network,
)
from shardmark.results.schema import RankRecord
from shardmark.results.store import RunFolder, load_run

STEPS = 39
SECONDS = 6.25
"""The windows of an invented rank: 1.25 to 4 and 4.5 to 8 s after its first step."""
Counts = Mapping[str, tuple[float, float]]
"""Bytes a second that are sent and received, by interface."""
TIMES = [number / 4 for number in range(-2, 36)]
NODES: Sequence[Counts] = (
    {"lo": (390.0, 390.0), "eth0": (3900.0, 780.0), "idle": (0.0, 0.01)},
    {"lo": (0.0, 0.0), "eth0": (780.0, 3900.0)},
)
RANKS: Sequence[Mapping[int, Counts]] = (
    {0: {"eth0": (3900.0, 780.0)}, 1: {"lo": (390.0, 390.0)}},
    {2: {"eth0": (780.0, 3900.0)}},
)


def sample(
    seconds: float, network: Counts, ranks: Mapping[int, Counts], node: int = 0
) -> dict[str, Any]:
    def counters(rates: Counts) -> dict[str, Any]:
        return {
            name: {"bytes_sent": 1e9 + seconds * sent, "bytes_received": seconds * received}
            for name, (sent, received) in rates.items()
        }

    return {
        "node": node,
        "at_seconds": FIRST_STEP_AT_SECONDS + seconds,
        "ranks": [
            {
                "rank": rank,
                "pid": 4000 + rank,
                "cpu_seconds": seconds,
                "network": counters(rates),
            }
            for rank, rates in ranks.items()
        ],
        "network": counters(network),
        "gpus": [],
    }


def later(rank: RankRecord, seconds: float) -> RankRecord:
    windows = tuple(
        window.model_copy(update={"started_at_seconds": window.started_at_seconds + seconds})
        for window in rank.windows
    )
    assert rank.first_step_at_seconds is not None
    began = rank.first_step_at_seconds + seconds
    return rank.model_copy(update={"windows": windows, "first_step_at_seconds": began})


def two_nodes(folder: Path, *, ahead_seconds: float = 0.0) -> Comparison:
    """One trial of three ranks: two on the first node, which sends, and one on the second.

    The second node's clock may be ahead.
    """
    placed = tuple(
        later(invented_rank(number), node * ahead_seconds).model_copy(update={"node": node})
        for number, node in enumerate((0, 0, 1))
    )
    made = invented_trial("ddp", 3, ranks=placed)
    made = made.model_copy(update={"trial": {**made.trial, "nodes": 2}})
    lines = [sample(at, NODES[node], RANKS[node], node) for at in TIMES for node in (1, 0)]
    for line in lines:
        line["at_seconds"] += line["node"] * ahead_seconds
    return comparison_of(folder, [made], samples=lambda _: lines)


def on_loopback(
    folder: Path, times: Sequence[float], sent: Callable[[float], float] | None = None
) -> tuple[Comparison, TrafficOfRow]:
    """Two ranks on one node; `sent` tells the bytes by then, else nine a second."""
    lines = [sample(at, {"lo": (9.0, 9.0)}, {}) for at in times]
    for at, line in zip(times, lines, strict=True):
        if sent is not None:
            line["network"] = {"lo": {"bytes_sent": sent(at), "bytes_received": 0}}
    comparison = comparison_of(folder, [invented_trial("ddp", 2)], samples=lambda _: lines)
    return comparison, traffic_of(comparison.rows[0])


@pytest.fixture
def nodes(tmp_path: Path) -> Comparison:
    return two_nodes(tmp_path / "two")


def test_interfaces_are_told_apart_by_node(nodes: Comparison) -> None:
    traffic = traffic_of(nodes.rows[0])
    assert not traffic.missing
    assert [(each.node, each.name, each.ranks) for each in traffic.interfaces] == [
        (0, "eth0", 2),
        (0, "lo", 2),
        (1, "eth0", 1),
    ]
    first = traffic.interfaces[0]
    assert first.sent.step_bytes is not None
    assert first.sent.step_bytes.value == pytest.approx(3900 * SECONDS / STEPS)
    assert first.received.mean_bytes_per_second == pytest.approx(780)
    assert first.sent.peak_bytes_per_second == pytest.approx(3900)
    assert first.sent.over_time.y == pytest.approx([3900] * len(first.sent.over_time.x))
    assert (min(first.sent.over_time.x), max(first.sent.over_time.x)) == (0.125, 7.875)


def test_bursts_have_a_peak(tmp_path: Path) -> None:
    """All bytes of the windows in a half of a second."""
    _, traffic = on_loopback(tmp_path, TIMES, lambda at: 1000 * min(max(at - 2, 0), 0.5))
    (each,) = traffic.interfaces
    assert each.sent.mean_bytes_per_second == pytest.approx(500 / SECONDS)
    assert each.sent.peak_bytes_per_second == pytest.approx(1000)


def test_few_samples_give_no_peak_and_an_early_end_no_bytes(tmp_path: Path) -> None:
    """Every second, seven in the windows: the mean is known, a peak is not."""
    comparison, traffic = on_loopback(tmp_path / "few", [float(at) for at in range(-1, 10)])
    (each,) = traffic.interfaces
    assert each.sent.mean_bytes_per_second == pytest.approx(9)
    assert each.sent.peak_bytes_per_second is None
    notes = " ".join(note for table in network_tables(comparison) for note in table.notes)
    assert "Peak left out: at most 7 samples" in notes
    _, ended = on_loopback(tmp_path / "early", [at for at in TIMES if at < 3])
    assert ended.missing["interfaces"] == "no sample was taken after the last window"


def test_a_node_s_clock_may_be_wrong(tmp_path: Path) -> None:
    """Its samples are cut to the windows of its own ranks, which that clock timed as well."""
    traffic = traffic_of(two_nodes(tmp_path / "two", ahead_seconds=1000.0).rows[0])
    assert not traffic.missing
    second = traffic.interfaces[2]
    assert second.received.mean_bytes_per_second == pytest.approx(3900)
    assert min(second.sent.over_time.x) == pytest.approx(0.125)


def test_a_sum_over_nodes_is_no_difference_between_them(nodes: Comparison) -> None:
    """The figure of network and CPU: counters of two nodes have nothing to do with each other."""
    curves = sampled(nodes.rows[0])
    assert curves is not None
    assert {round(value) for value in curves.network_bytes_per_second.y} == {3900 + 390 + 780}
    assert {round(value) for value in curves.cpu_percent.y} == {300}


def test_the_tables_for_people_and_programs(nodes: Comparison, tmp_path: Path) -> None:
    write_network(tmp_path / "two", record())
    tables = network_tables(nodes)
    _, collectives, interfaces, _ = tables
    assert tables[-1].title == "Links between 2 ranks, gloo"
    assert collectives.cells("counted_calls") == ("2",)
    assert collectives.cells("counted_payload_bytes") == ("44.70",)
    assert interfaces.cells("interface") == ("eth0", "lo", "eth0")
    document = network_json(tables)
    json.dumps(document, allow_nan=False)
    numbers = {key: len(lines) for key, lines in document.items()}
    assert numbers == {"bytes": 1, "collectives": 1, "interfaces": 3, "links": 0}
    first = document["interfaces"][0]
    assert first["sent_mean_bytes_per_second"] == pytest.approx(3900)
    assert len(first["sent_over_time"]["seconds"]) == 32
    assert set(document["bytes"][0]["missing"]) == {"formula_bytes"}
    lines = csv.DictReader(io.StringIO(render_csv(tables)))
    received = [line["received_mean_bytes_per_second"] for line in lines]
    assert [float(value) for value in received if value][2] == pytest.approx(3900)


def test_what_is_not_counted_is_said_of_gpus(nodes: Comparison, tmp_path: Path) -> None:
    trial = invented_trial("ddp", 2)
    on_gpus = trial.model_copy(update={"trial": {**trial.trial, "device_type": "cuda"}})
    compared = comparison_of(tmp_path / "gpus", [on_gpus], samples=lambda _: [])
    said = [" ".join(network_tables(each)[0].notes) for each in (nodes, compared)]
    assert ["Not counted" in text for text in said] == [False, True]
    assert all(word in said[1] for word in ("PCIe", "shared memory", "NVLink", "InfiniBand"))


def test_the_command(nodes: Comparison, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["compare", str(nodes.rows[0].folder), "--network"]
    for form, said in (
        ("text", "No network.json is stored with this run"),
        ("markdown", "### Bandwidth by interface"),
        ("latex", "\\caption{Bandw"),
        ("json", '"interfaces"'),
    ):
        assert cli.main([*command, "--format", form]) == 0
        assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    ("low", "high", "noisy"), [(4e7, 1.7e8, True), (5e7, 1.9e8, False), (None, None, True)]
)
def test_bandwidths_that_are_hardly_known_are_said(
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
    notes = " ".join(links_table(record(operation)).notes)
    assert ("too noisy: all reduce (between hosts)" in notes) is noisy


def test_why_links_are_not_there(nodes: Comparison, tmp_path: Path) -> None:
    RunFolder(tmp_path / "two").write_environment({"links_missing": "timed_out: no end"})
    assert network_tables(nodes)[-1].notes == ("Links could not be measured: timed_out: no end.",)
    (tmp_path / "two" / "network.json").write_text("{")
    (note,) = network_tables(nodes)[-1].notes
    assert "network.json" in note
    assert "measure again" in note


def test_the_page_and_its_figure(nodes: Comparison, tmp_path: Path) -> None:
    write_network(tmp_path / "two", record())
    (panel,) = {figure.name: figure for figure in figures_of(nodes)}["bandwidth"].panels
    assert [each.name for each in panel.series] == ["node 0, eth0", "node 0, lo", "node 1, eth0"]
    out = tmp_path / "page.html"
    write_report([load_run(tmp_path / "two")], nodes, out, images=False)
    for said in ('id="network"', "Links between 2 ranks, gloo", 'id="figure-bandwidth"'):
        assert said in out.read_text()


def test_one_process_or_no_folder_has_no_network(nodes: Comparison, tmp_path: Path) -> None:
    run = load_run(write_run(tmp_path / "one", [invented_trial("single", 1)]))
    comparison = compare([run])
    assert "bandwidth" not in {figure.name for figure in figures_of(comparison)}
    write_report([run], comparison, tmp_path / "page.html", images=False)
    assert 'id="network"' not in (tmp_path / "page.html").read_text()
    assert set(traffic_of(replace(nodes.rows[0], folder=None)).missing) == {"interfaces"}


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
