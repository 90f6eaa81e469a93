"""View of the network: bytes by formula and as measured, interfaces, and a run's links."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

from shardmark.base.errors import InputError
from shardmark.base.results.network import (
    NETWORK_FILE,
    Bounds,
    MeasuredOperation,
    NetworkRecord,
    read_network,
)
from shardmark.base.results.store import LINKS_REASON, RunFolder
from shardmark.base.statistics.intervals import Estimate
from shardmark.base.table.formats import records
from shardmark.base.table.table import (
    Column,
    Columns,
    Missing,
    Table,
    Value,
    for_programs,
    table_of,
)
from shardmark.bench.analysis.compare.comparison import Comparison
from shardmark.bench.analysis.compare.rows import Row, grouped
from shardmark.bench.analysis.network.links import COSTS
from shardmark.bench.analysis.network.traffic import Interface, TrafficOfRow, traffic_of
from shardmark.bench.analysis.network.wire import WireOfRow, wires_of
from shardmark.bench.report.table.notes import by_reason, left_out
from shardmark.bench.report.table.row_columns import table_by_row

KEYS = {
    "Bytes on the network": "bytes",
    "Collectives of a step": "collectives",
    "Collectives by phase": "collectives_by_phase",
    "Bandwidth by interface": "interfaces",
}
"""Title of a table -> its key in JSON; tables of links have the key `links`."""
BYTES, COLLECTIVES, PHASES, INTERFACES = KEYS
WIDEST_FACTOR = 4.0
"""Largest ratio of the ends of a bandwidth's interval; a wider one is called too noisy."""
REACHES = {"same_host": "one host", "between_hosts": "between hosts"}
HOW_TO_MEASURE = (
    f"No {NETWORK_FILE} is stored with this run. measure.link_seconds measures links before the"
    " trials; `shardmark doctor --network` prints them at any time."
)
BYTES_NOTES = (
    "MB (10^6 bytes) that the network carries for one training rank in one step.",
    "formula: follows from the strategy's definition.  collectives: the minimum for the collectives"
    " of a probed step.  interfaces: sent in the measured steps, with headers and other programs.",
    "Ratios are to the formula.  interfaces / collectives shows what backend and protocols add.",
)
GPU_NOTE = (
    "Not counted: traffic between GPUs of one node over PCIe or shared memory.  NVLink and"
    " InfiniBand are counted if NVML and /sys/class/infiniband report them, for all programs."
)
INTERFACES_NOTE = (
    "MB in the time of a step, of all ranks and other programs on the node; lo, the loopback,"
    " connects ranks of one node.  MB/s: mean over measured windows, and peak between two samples."
    "  errors: packets that were lost or dropped."
)
KINDS_NOTE = (
    "Collectives of a training rank in one step: calls, and MB of their input tensors (a gather's"
    " input is one shard), as counted and by the formula."
)
PHASES_NOTE = (
    "The same by phase of the step.  update: from the last backward pass to the end of the step."
    "  other: outside of the three, such as losses and messages between pipeline stages."
)

_text = partial(Column, numeric=False)
_ratio = partial(Column, decimals=2)
_megabytes = partial(Column, unit="MB", scale=1e-6, decimals=2, base_unit="bytes")
_estimated_megabytes = partial(_megabytes, interval="±", estimated=True)
_speed = partial(Column, unit="MB/s", scale=1e-6)


def network_tables(comparison: Comparison) -> list[Table]:
    """Return the tables of bytes, collectives, interfaces, and of each run's links."""
    wires = [
        wire
        for wire in wires_of(comparison.rows)
        if any(len(trial.ranks) > 1 for trial in wire.row.ok_trials)
    ]
    traffic = [traffic_of(wire.row) for wire in wires]
    folders = dict.fromkeys(row.folder for row in comparison.rows if row.folder is not None)
    tables = [_bytes_table(wires, comparison.rows)]
    if kinds := [(wire.row, kind) for wire in wires for kind in wire.kinds]:
        tables.append(table_by_row(COLLECTIVES, kinds, _KINDS, [KINDS_NOTE]))
    if phases := [(wire.row, phase) for wire in wires for phase in wire.phases]:
        tables.append(table_by_row(PHASES, phases, _PHASES, [PHASES_NOTE]))
    if traffic:
        tables.append(_interfaces_table(traffic))
    return [*tables, *map(_run_links, folders)]


def network_json(tables: Sequence[Table]) -> dict[str, Any]:
    """Return the tables' rows under their keys: bytes, collectives, interfaces, links."""
    document: dict[str, list[Any]] = {key: [] for key in (*KEYS.values(), "links")}
    for table in tables:
        document[KEYS.get(table.title, "links")] += records(table)
    return document


def _bytes_table(wires: Sequence[WireOfRow], rows: Sequence[Row]) -> Table:
    if not wires:
        return Table(title=BYTES, notes=("No trial of several ranks ended ok.", *left_out(rows)))

    def value_or_missing(field: str, name: str, wire: WireOfRow) -> Value:
        value: Value = getattr(wire, field)
        return Missing(wire.missing.get(name, "not known")) if value is None else value

    def ratio(above: str, below: str, wire: WireOfRow) -> float | None:
        value, base = getattr(wire, above), getattr(wire, below)
        value = value.value if isinstance(value, Estimate) else value
        return value / base if value is not None and base else None

    columns: Columns[WireOfRow] = [
        (
            _megabytes("formula_bytes", "formula"),
            partial(value_or_missing, "defined_bytes", "formula"),
        ),
        (
            _megabytes("collective_bytes", "collectives"),
            partial(value_or_missing, "counted_bytes", "counted"),
        ),
        (_ratio("collective_ratio", "ratio"), partial(ratio, "counted_bytes", "defined_bytes")),
        (
            _estimated_megabytes("interface_bytes", "interfaces"),
            partial(value_or_missing, "interface_bytes", "interfaces"),
        ),
        (_ratio("interface_ratio", "ratio"), partial(ratio, "interface_bytes", "defined_bytes")),
        (
            _ratio("backend_ratio", "interfaces / collectives"),
            partial(ratio, "interface_bytes", "counted_bytes"),
        ),
    ]
    formulas = grouped(
        (text, wire.row.strategy)
        for wire in wires
        if wire.wire is not None
        for text in filter(None, (wire.wire.formula, wire.wire.note))
    )
    unknown = [
        (f"Not known: {name}: {reason}", wire.row.place)
        for wire in wires
        for name, reason in wire.missing.items()
    ]
    trials = [trial for wire in wires for trial in wire.row.ok_trials]
    on_gpus = any(trial.trial.get("device_type") == "cuda" for trial in trials)
    notes = [
        *BYTES_NOTES,
        *([GPU_NOTE] if on_gpus else []),
        *(f"{', '.join(names)}: {text}." for text, names in formulas.items()),
        *by_reason(unknown, len(wires)),
        *left_out(rows),
    ]
    return table_by_row(BYTES, [(wire.row, wire) for wire in wires], columns, notes)


_COUNTED: Columns[Any] = [
    (_text("kind", "collective"), lambda kind: kind.kind.replace("_", " ")),
    (Column("counted_calls", "calls"), attrgetter("counted_calls")),
    (_megabytes("counted_payload_bytes", "counted"), attrgetter("counted_bytes")),
]
_KINDS: Columns[Any] = [
    *_COUNTED,
    (_megabytes("formula_payload_bytes", "formula"), attrgetter("defined_bytes")),
]
_PHASES: Columns[Any] = [(_text("phase"), attrgetter("phase")), *_COUNTED]


def _interfaces_table(traffic: Sequence[TrafficOfRow]) -> Table:
    items = [
        (row_traffic.row, interface)
        for row_traffic in traffic
        for interface in row_traffic.interfaces
    ]
    columns: Columns[Interface] = [
        (Column("node", names_row=True), attrgetter("node")),
        (_text("interface", names_row=True), attrgetter("name")),
        *_one_way("sent"),
        *_one_way("received"),
        (
            Column("errors_per_second", "errors", unit="1/s"),
            attrgetter("errors.mean_bytes_per_second"),
        ),
    ]
    notes = [INTERFACES_NOTE] if items else ["No interface was sampled."]
    notes += _missing(traffic, "peaks", "Peak left out")
    return table_by_row(INTERFACES, items, columns, [*notes, *_missing(traffic, "interfaces")])


def _one_way(name: str) -> Columns[Interface]:

    def curve(interface: Interface) -> Value:
        points = getattr(interface, name).over_time
        return {"seconds": list(points.x), "bytes_per_second": list(points.y)}

    def column_of(column: Callable[..., Column], field: str, title: str, **options: Any) -> Any:
        return column(f"{name}_{field}", title, **options), attrgetter(f"{name}.{field}")

    return [
        column_of(_estimated_megabytes, "step_bytes", name),
        column_of(_speed, "mean_bytes_per_second", f"{name} mean"),
        column_of(_speed, "peak_bytes_per_second", f"{name} peak"),
        (for_programs(f"{name}_over_time"), curve),
    ]


def _missing(
    traffic: Sequence[TrafficOfRow], quantity: str, prefix: str = "Not known"
) -> list[str]:
    reasons = (
        (f"{prefix}: {row_traffic.missing[quantity]}", row_traffic.row.place)
        for row_traffic in traffic
        if quantity in row_traffic.missing
    )
    return by_reason(reasons, len(traffic))


def _run_links(folder: Path) -> Table:
    """Return the run's links, or a table with the reason for their absence."""
    try:
        record = read_network(folder)
    except InputError as error:
        reason = f"{error}."
    else:
        if record is not None:
            return links_table(record)
        stored = RunFolder(folder).read_environment().get(LINKS_REASON)
        reason = HOW_TO_MEASURE if stored is None else f"Links could not be measured: {stored}."
    return Table(title=f"Links, {folder.name}", notes=(reason,))


def links_table(record: NetworkRecord) -> Table:
    """Return a table with a line for each operation: latency and bandwidth with their intervals."""

    def fitted(field: str, operation: MeasuredOperation) -> Value:
        if operation.fit is None:
            return Missing(operation.reason or "not fitted")
        bounds: Bounds = getattr(operation.fit, field)
        noisy = bounds.low is None or (bounds.high or 0.0) > WIDEST_FACTOR * bounds.low
        return Estimate(value=bounds.value, low=bounds.low, high=bounds.high, n=1, too_noisy=noisy)

    interval_options: dict[str, Any] = {"interval": "to", "estimated": True}
    columns: Columns[MeasuredOperation] = [
        (_text("operation", names_row=True), _operation),
        (_text("reach"), lambda operation: REACHES[operation.reach]),
        (Column("ranks"), lambda operation: len(operation.ranks)),
        (
            Column("latency_seconds", "latency", unit="us", scale=1e6, **interval_options),
            partial(fitted, "latency_seconds"),
        ),
        (
            _speed("bytes_per_second", "bandwidth", **interval_options),
            partial(fitted, "bytes_per_second"),
        ),
        (
            Column("residual", "scatter", unit="%", scale=100, decimals=0),
            lambda operation: operation.fit.residual if operation.fit else None,
        ),
        (
            _megabytes("largest_bytes", "largest"),
            lambda operation: max((size.payload_bytes for size in operation.sizes), default=0),
        ),
        (_text("model", "model, seconds"), lambda operation: COSTS[operation.operation].model),
    ]
    title = f"Links between {record.world_size} ranks, {record.backend}"
    return table_of(title, record.operations, columns, _links_notes(record))


def _operation(operation: MeasuredOperation) -> str:
    return operation.operation.replace("_", " ")


def _links_notes(record: NetworkRecord) -> list[str]:
    hosts = list(dict.fromkeys(record.hosts))
    interface = "" if record.interface is None else f" over {record.interface}"
    plural = "s" if len(hosts) > 1 else ""
    notes = [
        f"{record.backend}{interface} on {len(hosts)} host{plural} ({', '.join(hosts)}), torch"
        f" {record.torch}.",
        "a: latency of one message; b: bandwidth of one rank's link, one way; m: payload; n: ranks."
        "  In brackets the 95 % interval.",
    ]
    if record.backend == "gloo":
        notes.append(
            "gloo's reduce-scatter is an all-reduce: its bandwidth here is half of the link's."
        )
    for operation in record.operations:
        if operation.reason:
            name = f"{_operation(operation)} ({REACHES[operation.reach]})"
            notes.append(f"No fit of {name}: {operation.reason}.")
    return notes
