"""Interfaces and ranks over time, from samples to `compare --network`, the page and the figures."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.golden.invented import invented_rank, invented_trial, write_run
from tests.unit.figures.runs import FIRST_STEP_AT_SECONDS, comparison_of

from shardmark import cli
from shardmark.analysis.compare.comparison import Comparison, compare
from shardmark.analysis.network.traffic import traffic_of
from shardmark.analysis.trial.series import sampled
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

WINDOWS = ((1.25, 4.0), (4.5, 8.0))
"""Of an invented rank, in seconds since the first step; 39 steps in all."""
STEPS = 39
SECONDS = 6.25
Counts = Mapping[str, tuple[float, float]]
"""Bytes a second that are sent and received, by interface."""


def sample(
    seconds: float, network: Counts, ranks: Mapping[int, Counts | None], node: int | None
) -> dict[str, Any]:
    def counters(rates: Counts) -> dict[str, Any]:
        return {
            name: {"bytes_sent": 1e9 + seconds * sent, "bytes_received": seconds * received}
            for name, (sent, received) in rates.items()
        }

    line: dict[str, Any] = {} if node is None else {"node": node}
    return line | {
        "at_seconds": FIRST_STEP_AT_SECONDS + seconds,
        "ranks": [
            {
                "rank": rank,
                "pid": 4000 + rank,
                "cpu_seconds": seconds,
                "network": None if rates is None else counters(rates),
            }
            for rank, rates in ranks.items()
        ],
        "network": counters(network),
        "gpus": [],
    }


TIMES = [number / 4 for number in range(-2, 36)]
NODES: Sequence[Counts] = (
    {"lo": (390.0, 390.0), "eth0": (3900.0, 780.0), "idle": (0.0, 0.01)},
    {"lo": (0.0, 0.0), "eth0": (780.0, 3900.0)},
)
RANKS: Sequence[Mapping[int, Counts]] = (
    {0: {"eth0": (3900.0, 780.0)}, 1: {"lo": (390.0, 390.0)}},
    {2: {"eth0": (780.0, 3900.0)}},
)


def later(rank: RankRecord, seconds: float) -> RankRecord:
    windows = tuple(
        one.model_copy(update={"started_at_seconds": one.started_at_seconds + seconds})
        for one in rank.windows
    )
    assert rank.first_step_at_seconds is not None
    began = rank.first_step_at_seconds + seconds
    return rank.model_copy(update={"windows": windows, "first_step_at_seconds": began})


def two_nodes(folder: Path, *, ranks: bool = True, ahead_seconds: float = 0.0) -> Comparison:
    """One trial of three ranks: two on the first node, which sends, and one on the second.

    The second node's clock may be ahead.
    """
    placed = tuple(
        later(invented_rank(number), node * ahead_seconds).model_copy(update={"node": node})
        for number, node in enumerate((0, 0, 1))
    )
    made = invented_trial("ddp", 3, ranks=placed)
    made = made.model_copy(update={"trial": {**made.trial, "nodes": 2}})
    lines = [
        sample(at, NODES[node], RANKS[node] if ranks else dict.fromkeys(RANKS[node]), node)
        for at in TIMES
        for node in (1, 0)
    ]
    for line in lines:
        line["at_seconds"] += line["node"] * ahead_seconds
    return comparison_of(folder, [made], samples=lambda _: lines)


@pytest.fixture
def nodes(tmp_path: Path) -> Comparison:
    return two_nodes(tmp_path / "two")


def test_interfaces_are_told_apart_by_node(nodes: Comparison) -> None:
    found = traffic_of(nodes.rows[0])
    assert not found.missing
    assert [(one.node, one.name, one.ranks) for one in found.interfaces] == [
        (0, "eth0", 2),
        (0, "lo", 2),
        (1, "eth0", 1),
    ]
    first = found.interfaces[0]
    assert first.sent.step_bytes is not None
    assert first.sent.step_bytes.value == pytest.approx(3900 * SECONDS / STEPS)
    assert first.received.mean_bytes_per_second == pytest.approx(780)
    assert first.sent.peak_bytes_per_second == pytest.approx(3900)
    assert first.sent.busy_share == 1.0
    assert first.sent.over_time.y == pytest.approx([3900] * len(first.sent.over_time.x))
    assert (min(first.sent.over_time.x), max(first.sent.over_time.x)) == (0.125, 7.875)


def test_ranks_are_told_apart_where_the_samples_do(nodes: Comparison, tmp_path: Path) -> None:
    found = traffic_of(nodes.rows[0])
    told = {(one.rank, one.node, one.interface): one for one in found.ranks}
    assert set(told) == {(0, 0, "eth0"), (1, 0, "lo"), (2, 1, "eth0")}
    assert told[0, 0, "eth0"].sent_bytes.value == pytest.approx(3900 * SECONDS / STEPS)
    assert told[2, 1, "eth0"].received_bytes.value == pytest.approx(3900 * SECONDS / STEPS)
    old = traffic_of(two_nodes(tmp_path / "old", ranks=False).rows[0])
    assert old.ranks == ()
    assert old.missing == {"ranks": "the samples do not tell the ranks' bytes apart"}


def test_bursts_have_a_peak_and_are_seldom_busy(tmp_path: Path) -> None:
    """All bytes of the windows in a half of a second."""
    lines = [
        sample(at, {"lo": (0.0, 0.0)}, {}, None)
        | {"network": {"lo": {"bytes_sent": 1000 * min(max(at - 2, 0), 0.5), "bytes_received": 0}}}
        for at in TIMES
    ]
    run = comparison_of(tmp_path, [invented_trial("ddp", 2)], samples=lambda _: lines)
    (one,) = traffic_of(run.rows[0]).interfaces
    assert one.sent.mean_bytes_per_second == pytest.approx(500 / SECONDS)
    assert one.sent.peak_bytes_per_second == pytest.approx(1000)
    assert one.sent.busy_share == pytest.approx(0.5 / SECONDS, rel=0.1)
    assert one.received.busy_share == 0.0


def test_few_samples_give_no_peak(tmp_path: Path) -> None:
    """Every second, seven in the windows: the mean is known, a peak is not."""
    lines = [sample(float(at), {"lo": (9.0, 9.0)}, {}, None) for at in range(-1, 10)]
    comparison = comparison_of(tmp_path, [invented_trial("ddp", 2)], samples=lambda _: lines)
    found = traffic_of(comparison.rows[0])
    (one,) = found.interfaces
    assert one.sent.mean_bytes_per_second == pytest.approx(9)
    assert (one.sent.peak_bytes_per_second, one.sent.busy_share) == (None, None)
    assert found.missing["peaks"].startswith("at most 7 samples in the windows of a repeat")
    tables = {table.title: table for table in network_tables(comparison)}
    notes = tables["Bandwidth by interface"].notes
    assert any(note.startswith("Peak and busy left out: at most 7") for note in notes)


def test_bandwidths_that_are_hardly_known_are_said() -> None:
    def operation(low: float | None, high: float | None) -> MeasuredOperation:
        fit = LinkFit(
            latency_seconds=Bounds(value=1e-4, low=None, high=None),
            bytes_per_second=Bounds(value=1e8, low=low, high=high),
            residual=0.1,
        )
        return MeasuredOperation(
            operation="all_reduce", reach="between_hosts", ranks=(0, 1), sizes=(), fit=fit
        )

    def noisy(low: float | None, high: float | None) -> bool:
        made = record().model_copy(update={"operations": (operation(low, high),)})
        return any(
            note.startswith("Bandwidth too noisy: all reduce (between hosts)")
            for note in links_table(made).notes
        )

    assert noisy(4e7, 1.7e8)
    assert not noisy(5e7, 1.9e8)
    assert noisy(None, None)


def test_samples_that_end_too_early_are_said(tmp_path: Path) -> None:
    lines = [sample(at, {"lo": (9.0, 9.0)}, {}, None) for at in TIMES if at < 3]
    run = comparison_of(tmp_path, [invented_trial("ddp", 2)], samples=lambda _: lines)
    found = traffic_of(run.rows[0])
    assert found.missing["interfaces"] == "no sample was taken after the last window"


def test_a_sum_over_nodes_is_no_difference_between_them(nodes: Comparison) -> None:
    """The figure of network and CPU: counters of two nodes have nothing to do with each other."""
    found = sampled(nodes.rows[0])
    assert found is not None
    assert {round(one) for one in found.network_bytes_per_second.y} == {3900 + 390 + 780}
    assert {round(one) for one in found.cpu_percent.y} == {300}


def test_a_node_s_clock_may_be_wrong(tmp_path: Path) -> None:
    """Its samples are cut to the windows of its own ranks, which that clock timed as well."""
    comparison = two_nodes(tmp_path / "two", ahead_seconds=1000.0)
    found = traffic_of(comparison.rows[0])
    assert not found.missing
    second = found.interfaces[2]
    assert second.received.mean_bytes_per_second == pytest.approx(3900)
    assert min(second.sent.over_time.x) == pytest.approx(0.125)
    assert found.ranks[2].rank == 2


def test_the_tables(nodes: Comparison, tmp_path: Path) -> None:
    write_network(tmp_path / "two", record())
    tables = {table.title: table for table in network_tables(nodes)}
    assert list(tables) == [
        "Bytes on the network",
        "Collectives of a step",
        "Bandwidth by interface",
        "Bytes by rank and interface",
        "Links between 2 ranks, gloo",
    ]
    collectives = tables["Collectives of a step"]
    assert collectives.cells("counted_calls") == ("2",)
    assert collectives.cells("counted_payload_bytes") == ("44.70",)
    assert tables["Bandwidth by interface"].cells("interface") == ("eth0", "lo", "eth0")
    assert len(tables["Bytes by rank and interface"].rows) == 3


def test_json_and_csv_have_base_units(nodes: Comparison) -> None:
    tables = network_tables(nodes)
    document = network_json(tables)
    first = document["interfaces"][0]
    assert first["sent_mean_bytes_per_second"] == pytest.approx(3900)
    assert len(first["sent_over_time"]["seconds"]) == 32
    assert document["ranks"][0]["interface"] == "eth0"
    assert document["collectives"][0]["counted_calls"] == 2
    assert set(document["bytes"][0]["missing"]) == {"formula_bytes"}
    json.dumps(document, allow_nan=False)
    lines = list(csv.DictReader(io.StringIO(render_csv(tables))))
    of_interfaces = [line for line in lines if line["sent_mean_bytes_per_second"]]
    assert [(line["node"], line["interface"]) for line in of_interfaces] == [
        ("0", "eth0"),
        ("0", "lo"),
        ("1", "eth0"),
    ]
    assert float(of_interfaces[2]["received_mean_bytes_per_second"]) == pytest.approx(3900)


def test_the_command(nodes: Comparison, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(nodes.rows[0].folder)
    assert cli.main(["compare", folder, "--network"]) == 0
    text = capsys.readouterr().out
    assert "Bandwidth by interface" in text
    assert "No network.json is stored with this run" in text
    assert cli.main(["compare", folder, "--network", "--format", "json"]) == 0
    assert set(json.loads(capsys.readouterr().out)["network"]["bytes"][0]) > {"strategy"}
    for form, found in (("markdown", "### Bandwidth by interface"), ("latex", "\\caption{Bandw")):
        assert cli.main(["compare", folder, "--network", "--format", form]) == 0
        assert found in capsys.readouterr().out
    assert cli.main(["compare", folder, "--network", "--scaling", "--format", "csv"]) == 2


def test_why_links_are_not_there(nodes: Comparison, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "two")
    folder.write_environment({"links_missing": "timed_out: no end"})
    assert network_tables(nodes)[-1].notes == ("Links could not be measured: timed_out: no end.",)
    (tmp_path / "two" / "network.json").write_text("{")
    (note,) = network_tables(nodes)[-1].notes
    assert "network.json" in note
    assert "measure again" in note


def test_the_page_and_its_figure(nodes: Comparison, tmp_path: Path) -> None:
    write_network(tmp_path / "two", record())
    figures = {one.name: one for one in figures_of(nodes)}
    (panel,) = figures["bandwidth"].panels
    assert [one.name for one in panel.series] == ["node 0, eth0", "node 0, lo", "node 1, eth0"]
    out = tmp_path / "page.html"
    write_report([load_run(tmp_path / "two")], nodes, out, images=False)
    page = out.read_text()
    assert 'id="network"' in page
    assert "Links between 2 ranks, gloo" in page
    assert 'id="figure-bandwidth"' in page


def test_one_process_has_no_network(tmp_path: Path) -> None:
    run = load_run(write_run(tmp_path / "one", [invented_trial("single", 1)]))
    comparison = compare([run])
    assert "bandwidth" not in {one.name for one in figures_of(comparison)}
    write_report([run], comparison, tmp_path / "page.html", images=False)
    assert 'id="network"' not in (tmp_path / "page.html").read_text()


def test_no_folder_no_samples(nodes: Comparison) -> None:
    found = traffic_of(replace(nodes.rows[0], folder=None))
    assert found.missing == dict.fromkeys(("interfaces", "ranks"), "no samples were stored")


def record() -> NetworkRecord:
    return NetworkRecord(
        measured_at_seconds=1.0,
        backend="gloo",
        device_type="cpu",
        hosts=("a", "b"),
        interface=None,
        torch="2.15",
        operations=(),
    )
