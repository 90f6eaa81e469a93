"""Every row node by node: the numbers of its own ranks, devices and interfaces alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

from shardmark.analysis.compare.comparison import Comparison
from shardmark.analysis.compare.rows import Row
from shardmark.analysis.statistics.intervals import Estimate, estimate_mean
from shardmark.analysis.trial.over_ranks import Result
from shardmark.analysis.trial.rank_metrics import (
    communication_metrics,
    error_metrics,
    memory_metrics,
    rate_metrics,
    read_steps,
    slowest,
    time_metrics,
    windows_of,
)
from shardmark.analysis.trial.raw_files import Line, mapping, number, raw_lines
from shardmark.analysis.trial.sampled_metrics import (
    Windows,
    device_metrics,
    network_metrics,
    process_metrics,
)
from shardmark.core.metrics import METRICS
from shardmark.core.run_files import SAMPLES_FILE, STEPS_FILE
from shardmark.report.table.columns import for_items, metric_column, row_columns
from shardmark.report.table.gaps import by_reason, left_out
from shardmark.report.table.table import Column, Missing, Table, Value, table_of
from shardmark.results.schema import Summary, TrialResult
from shardmark.results.store import RunFolder

LOOPBACK = "lo"
LINK_METRICS = ("link_sent_bytes_per_second", "link_received_bytes_per_second")
"""Beside the catalogue's, which count the loopback, too: over all other interfaces of the node."""
OF_NO_NODE = ("epoch_seconds", "total_seconds", "model_flops_per_second", "mfu")
"""A trial's, or samples per second in another unit."""
ERROR_METRICS = ("nonfinite_steps", "skipped_steps", "data_errors")
NODE_METRICS = (
    *(
        metric.name
        for metric in METRICS.values()
        if metric.group in ("time", "rate", "memory", "network", "processes", "device")
        and metric.name not in (*OF_NO_NODE, "speedup", "scaling_efficiency", "memory_ratio")
    ),
    *ERROR_METRICS,
)
"""Of the catalogue: what differs from node to node, and is no relation between trials."""
NO_WINDOW = "no window was measured on the node"


SHOWN = (
    "samples_per_second",
    "step_seconds",
    "exposed_communication_seconds",
    "peak_memory_bytes",
    "peak_rss_bytes",
    "device_used_bytes",
    "cpu_percent",
    "gpu_utilization",
    "power_watts",
    *LINK_METRICS,
    "processes",
    "threads",
)
"""For people; CSV and JSON hold every metric."""
EXPLANATION = (
    "A node's numbers are those of its own ranks: samples/s and processes together, CPU and GPU %"
    " the mean, the rest of the fullest or slowest rank. CPU: 100 is one core kept busy. MB/s (10^6"
    " bytes): all interfaces but the loopback, other programs included."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOfRow:
    """One node of one row, over the trials that ended ok."""

    row: Row
    node: int
    hosts: tuple[str, ...]
    ranks: tuple[int, ...]
    """Servers included."""
    servers: int
    metrics: Mapping[str, Estimate | None]
    """`NODE_METRICS` and `LINK_METRICS`; each comes from the ranks as the catalogue says."""
    missing: Mapping[str, str]


def nodes_tables(comparison: Comparison) -> list[Table]:
    """One line for each node of each row."""
    nodes = _nodes_of(comparison.rows)
    node_column = Column(key="node", title="node", names_row=True)
    table = table_of(
        "Node by node",
        nodes,
        [
            *for_items(row_columns([node.row for node in nodes]), attrgetter("row")),
            (node_column, lambda node: node.node),
            (_text("hosts", "host"), lambda node: ", ".join(node.hosts)),
            (Column(key="ranks_here", title="its", unit="ranks", shown_to="people"), _ranks),
            (_programs("ranks"), lambda node: list(node.ranks)),
            (_programs("servers"), lambda node: node.servers),
            *(_metric(name) for name in SHOWN),
            (Column(key="errors", title="errors", shown_to="people"), _errors),
            *(_metric(name) for name in (*NODE_METRICS, *LINK_METRICS) if name not in SHOWN),
        ],
        [*_notes(nodes), *left_out(comparison.rows)],
    )
    return [table]


def _text(key: str, title: str) -> Column:
    return Column(key=key, title=title, numeric=False)


def _programs(key: str) -> Column:
    return Column(key=key, title=key, shown_to="programs")


def _metric(name: str) -> tuple[Column, Callable[[NodeOfRow], Value]]:
    column = metric_column(name, shown_to="all" if name in SHOWN else "programs")
    return column, lambda node: node.metrics[name] or Missing(node.missing[name])


def _ranks(node: NodeOfRow) -> str:
    """Workers, and servers beside them: `2+1`."""
    workers = len(node.ranks) - node.servers
    return f"{workers}+{node.servers}" if node.servers else str(workers)


def _errors(node: NodeOfRow) -> float | None:
    """Steps and samples that went wrong; None where nothing did."""
    known = [node.metrics[name] for name in ERROR_METRICS]
    return sum(estimate.value for estimate in known if estimate is not None) or None


def _notes(nodes: Sequence[NodeOfRow]) -> list[str]:
    if not nodes:
        return ["No trial ended ok."]
    notes = [EXPLANATION]
    if any(_errors(node) for node in nodes):
        notes.append("Errors: steps with a loss that is no number or skipped, unreadable samples.")
    if any(node.servers for node in nodes):
        notes.append("Parameter servers stand behind the +.")
    if max(len(node.row.ok_trials) for node in nodes) > 1:
        notes.append("Means over the repeats, ± 95 % interval of the mean (Student's t).")
    # What no line has, as a CPU's device metrics, has no column either and needs no reason.
    unknown = [
        (f"Not known: {name}: {node.missing[name]}", f"node {node.node} of {node.row.place}")
        for name in SHOWN
        if any(name not in node.missing for node in nodes)
        for node in nodes
        if name in node.missing
    ]
    return [*notes, *by_reason(unknown, len(nodes))]


def _nodes_of(rows: Sequence[Row]) -> list[NodeOfRow]:
    """Every node of every row that ended ok at least once; reads the trials' raw files."""
    nodes: list[NodeOfRow] = []
    for row in rows:
        trials = [(trial, *_raw(row, trial)) for trial in row.ok_trials]
        for node in sorted({rank.node for trial, *_ in trials for rank in trial.ranks}):
            by_repeat = [
                _of_trial(trial, node, steps, samples)
                for trial, steps, samples in trials
                if any(rank.node == node for rank in trial.ranks)
            ]
            nodes.append(_of_row(row, node, by_repeat))
    return nodes


def _raw(row: Row, trial: TrialResult) -> tuple[list[Line], list[Line]]:
    """Steps and samples; lines that are none are left out."""
    if row.folder is None:
        return [], []
    folder = RunFolder(row.folder).trial_folder(trial.id)
    steps = [
        line
        for line in raw_lines(folder / STEPS_FILE)
        if "measured" in line and None not in (number(line.get("step")), number(line.get("rank")))
    ]
    samples = [
        line
        for line in raw_lines(folder / SAMPLES_FILE)
        if number(line.get("at_seconds")) is not None
    ]
    return steps, samples


def _of_trial(
    trial: TrialResult, node: int, steps: Sequence[Line], samples: Sequence[Line]
) -> dict[str, Result]:
    """The catalogue's own computations, given one node's ranks and samples.

    Windows are those of the node's slowest rank, so that one clock timed them and the samples; of a
    node that only holds parameters, those of the trial's slowest.
    """
    ranks = sorted((r for r in trial.ranks if r.lost is None), key=lambda rank: rank.rank)
    here = [rank for rank in ranks if rank.node == node]
    workers = [rank for rank in here if rank.role == "worker"]
    own = [sample for sample in samples if sample.get("node", 0) == node]
    taken = read_steps(steps)
    windows = windows_of(slowest(workers or [rank for rank in ranks if rank.role == "worker"]))
    device_type = str(trial.trial.get("device_type", "cpu"))
    metrics: dict[str, Result] = dict.fromkeys((*NODE_METRICS, *LINK_METRICS), NO_WINDOW)
    if workers:
        metrics |= time_metrics(workers, taken, trial.started_at_seconds, NO_WINDOW)
        metrics |= rate_metrics(workers, trial.layout, NO_WINDOW, NO_WINDOW)
        metrics |= communication_metrics(workers)
    metrics |= memory_metrics(here, device_type)
    if windows.spans:
        metrics |= network_metrics(own, windows)
        metrics |= process_metrics(own, here, windows)
        metrics |= device_metrics(own, windows, device_type)
        metrics |= _link_metrics(own, windows)
    metrics |= error_metrics(here)
    return {name: metrics[name] for name in (*NODE_METRICS, *LINK_METRICS)}


def _link_metrics(samples: Sequence[Line], windows: Windows) -> dict[str, Result]:
    """Bytes a second that left the node, and that came to it."""
    outward = [{**sample, "network": _without_loopback(sample)} for sample in samples]
    if samples and not any(sample["network"] for sample in outward):
        return dict.fromkeys(LINK_METRICS, "the node has no interface but its loopback")
    totals = network_metrics(outward, windows)
    rates: dict[str, Result] = {}
    for name, way in zip(LINK_METRICS, ("sent", "received"), strict=True):
        total = totals[f"network_{way}_bytes"]
        if not isinstance(total, str):
            total = Summary(value=total.value / windows.seconds, over="trial")
        rates[name] = total
    return rates


def _without_loopback(sample: Line) -> dict[str, object]:
    counters = mapping(sample.get("network"))
    return {name: counts for name, counts in counters.items() if name != LOOPBACK}


def _of_row(row: Row, node: int, trials: Sequence[Mapping[str, Result]]) -> NodeOfRow:
    here = [rank for trial in row.ok_trials for rank in trial.ranks if rank.node == node]
    metrics: dict[str, Estimate | None] = {}
    missing: dict[str, str] = {}
    for name, first in trials[0].items():
        known = [result.value for trial in trials if isinstance(result := trial[name], Summary)]
        metrics[name] = estimate_mean(known) if known else None
        if not known:
            missing[name] = str(first)
    return NodeOfRow(
        row=row,
        node=node,
        hosts=tuple(dict.fromkeys(rank.host for rank in here)),
        ranks=tuple(sorted({rank.rank for rank in here})),
        servers=len({rank.rank for rank in here if rank.role == "server"}),
        metrics=metrics,
        missing=missing,
    )
