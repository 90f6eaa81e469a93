"""Every row node by node: speed, memory, processor, network and devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shardmark.analysis.compare.comparison import Comparison
from shardmark.analysis.compare.per_node import (
    ERROR_METRICS,
    LINK_METRICS,
    NODE_METRICS,
    NodeOfRow,
    nodes_of,
)
from shardmark.analysis.compare.rows import Row
from shardmark.report.table.columns import for_items, metric_column, row_columns
from shardmark.report.table.gaps import by_reason, left_out
from shardmark.report.table.table import Column, Missing, Table, Value, table_of

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


def nodes_tables(comparison: Comparison) -> list[Table]:
    """One line for each node of each row."""
    nodes = nodes_of(comparison.rows)
    node_column = Column(key="node", title="node", names_row=True)
    table = table_of(
        "Node by node",
        nodes,
        [
            *for_items(row_columns([node.row for node in nodes]), _row_of),
            (node_column, lambda node: node.node),
            (_text("hosts", "host"), lambda node: ", ".join(node.hosts)),
            (Column(key="ranks_here", title="its", unit="ranks", shown_to="people"), _ranks),
            (_programs("ranks"), lambda node: list(node.ranks)),
            (_programs("servers"), lambda node: node.servers),
            *(_metric(name) for name in SHOWN),
            (Column(key="errors", title="errors", shown_to="people"), _errors),
            *(_metric(name) for name in (*NODE_METRICS, *LINK_METRICS) if name not in SHOWN),
            (_programs("over_ranks"), _over_ranks),
        ],
        [*_notes(nodes), *left_out(comparison.rows)],
    )
    return [table]


def _text(key: str, title: str) -> Column:
    return Column(key=key, title=title, numeric=False)


def _programs(key: str) -> Column:
    return Column(key=key, title=key, shown_to="programs")


def _row_of(node: NodeOfRow) -> Row:
    return node.row


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


def _over_ranks(node: NodeOfRow) -> Value:
    """Mean and maximum over the node's ranks of each metric that is a rank's."""
    return {
        name: {"mean": spread.mean, "maximum": spread.maximum}
        for name, spread in node.over_ranks.items()
    }


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
