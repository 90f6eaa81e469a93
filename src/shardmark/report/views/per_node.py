"""Every row node by node: speed, memory, processor, network and devices, as a table and data."""

from __future__ import annotations

from collections.abc import Sequence

from shardmark.analysis.compare.comparison import Comparison
from shardmark.analysis.compare.per_node import LINK_METRICS, NODE_METRICS, NodeOfRow, nodes_of
from shardmark.analysis.statistics.intervals import Estimate
from shardmark.core.metrics import METRICS
from shardmark.report.table.data import estimate_columns, estimate_of, flat, format_csv, identity_of
from shardmark.report.table.quantities import Quantity
from shardmark.report.table.sections import Section, View
from shardmark.report.table.tables import NOTHING, Column, Table, row_names
from shardmark.report.views.epochs import left_out, where

_MEBIBYTES = 2.0**-20
_MEGABYTES = 1e-6
_COLUMNS = {
    "samples_per_second": Quantity("samples/s"),
    "step_seconds": Quantity("step\nms", scale=1000),
    "exposed_communication_seconds": Quantity("exposed\nms", scale=1000),
    "peak_memory_bytes": Quantity("peak\nMiB", scale=_MEBIBYTES),
    "peak_rss_bytes": Quantity("RSS\nMiB", scale=_MEBIBYTES),
    "device_used_bytes": Quantity("GPU used\nMiB", scale=_MEBIBYTES),
    "cpu_percent": Quantity("CPU\n%", decimals=0),
    "gpu_utilization": Quantity("GPU\n%", decimals=0),
    "power_watts": Quantity("GPUs\nW", decimals=0),
    "link_sent_bytes_per_second": Quantity("sent\nMB/s", scale=_MEGABYTES, decimals=2),
    "link_received_bytes_per_second": Quantity("received\nMB/s", scale=_MEGABYTES, decimals=2),
    "processes": Quantity("proc.", decimals=0),
    "threads": Quantity("threads", decimals=0),
}
"""Those of the table; JSON and CSV hold every one."""
_UNITS = dict.fromkeys(LINK_METRICS, "bytes/s")
_ERRORS = ("nonfinite_steps", "skipped_steps", "data_errors")
EXPLANATION = (
    "A node's numbers are those of its own ranks: samples/s and processes together, CPU and GPU %"
    " the mean, the rest of the fullest or slowest rank. CPU: 100 is one core kept busy. MB/s (10^6"
    " bytes) over all interfaces but the loopback, other programs' included. Samples and windows"
    " are timed by the node's own clock."
)


def nodes_view(comparison: Comparison) -> View:
    return View(
        key="nodes",
        sections=lambda: (nodes_section(comparison),),
        data=lambda: nodes_json(comparison),
        csv=lambda: nodes_csv(comparison),
    )


def nodes_section(comparison: Comparison) -> Section:
    """One line for each node of each row; columns without any content are left out."""
    found = nodes_of(comparison.rows)
    rows = [one.row for one in found]
    columns = (
        *row_names(rows),
        Column(title="node", cells=tuple(str(one.node) for one in found), key=True),
        Column(title="host", cells=tuple(", ".join(one.hosts) for one in found), numeric=False),
        Column(title="its\nranks", cells=tuple(_ranks(one) for one in found)),
        *(
            Column(title=shown_as.title, cells=tuple(_cell(one, name, shown_as) for one in found))
            for name, shown_as in _COLUMNS.items()
        ),
        Column(title="errors", cells=tuple(_errors(one) for one in found)),
    )
    shown = tuple(one for one in columns if any(cell not in ("", NOTHING) for cell in one.cells))
    notes = (*_notes(found), *left_out(comparison.rows))
    return Section(title="Node by node", table=Table(columns=shown, notes=notes))


def _ranks(one: NodeOfRow) -> str:
    """Workers, and servers beside them: `2+1`."""
    workers = len(one.ranks) - one.servers
    return f"{workers}+{one.servers}" if one.servers else str(workers)


def _cell(one: NodeOfRow, name: str, shown_as: Quantity) -> str:
    """With its interval for the throughput alone, as in the comparison."""
    text = shown_as.show(one.metrics[name]) or NOTHING
    return text if name == "samples_per_second" else text.partition(" ")[0]


def _errors(one: NodeOfRow) -> str:
    """Steps and samples that went wrong; nothing where nothing did."""
    known = [estimate.value for name in _ERRORS if (estimate := one.metrics[name]) is not None]
    return f"{sum(known):g}" if sum(known) else ""


def _notes(found: Sequence[NodeOfRow]) -> list[str]:
    if not found:
        return ["No trial ended ok."]
    notes = [EXPLANATION]
    if any(_errors(one) for one in found):
        notes.append("Errors: steps with a loss that is no number or skipped, unreadable samples.")
    if any(one.servers for one in found):
        notes.append("Parameter servers stand behind the +.")
    if max(len(one.row.ok_trials) for one in found) > 1:
        notes.append("Means over the repeats, ± 95 % interval of the mean (Student's t).")
    reasons: dict[str, list[str]] = {}
    for one in found:
        for name in (name for name in _COLUMNS if name in one.missing):
            text = f"Not known: {name}: {one.missing[name]}"
            reasons.setdefault(text, []).append(f"node {one.node} of {one.row.place}")
    # What no line has, as a CPU's device metrics, has no column either and needs no reason.
    partly = {text: places for text, places in reasons.items() if len(places) < len(found)}
    return [*notes, *(f"{text}{where(places, len(found))}." for text, places in partly.items())]


def nodes_json(comparison: Comparison) -> list[dict[str, object]]:
    """One mapping for each node of each row."""
    return [
        identity_of(one.row)
        | {
            "node": one.node,
            "hosts": list(one.hosts),
            "ranks": list(one.ranks),
            "servers": one.servers,
            "metrics": {name: _metric(one, name) for name in one.metrics},
            "missing": dict(one.missing),
        }
        for one in nodes_of(comparison.rows)
    ]


def _metric(one: NodeOfRow, name: str) -> dict[str, object] | None:
    """With mean and maximum over the node's ranks, where it is a rank's."""
    estimate: Estimate | None = one.metrics[name]
    if estimate is None:
        return None
    spread = one.over_ranks.get(name)
    known = estimate_of(estimate, name) | {"unit": _UNITS.get(name) or METRICS[name].unit}
    over = {} if spread is None else {"mean": spread.mean, "maximum": spread.maximum}
    return known | {"over_ranks": over or None}


def nodes_csv(comparison: Comparison) -> str:
    """One line for each node of each row; each metric is three columns, as in the comparison."""
    found = nodes_of(comparison.rows)
    keys = dict.fromkeys(key for one in found for key in identity_of(one.row))
    names = (*NODE_METRICS, *LINK_METRICS)
    lines = [
        identity_of(one.row)
        | {"node": one.node, "hosts": ", ".join(one.hosts), "node_ranks": len(one.ranks)}
        | {key: value for name in names for key, value in flat(name, one.metrics[name])}
        for one in found
    ]
    columns = [column for name in names for column in estimate_columns(name)]
    return format_csv(lines, [*keys, "node", "hosts", "node_ranks", *columns])
