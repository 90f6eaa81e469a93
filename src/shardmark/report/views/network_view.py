"""All that a comparison knows of the network, in every form: `compare --network`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from shardmark.analysis.compare.comparison import Comparison
from shardmark.analysis.compare.rows import Row
from shardmark.analysis.network.traffic import TrafficOfRow, traffic_of
from shardmark.analysis.network.wire import WireOfRow, wires_of
from shardmark.core.errors import InputError
from shardmark.report.table.columns import identity_of
from shardmark.report.table.data import estimate_columns, flat, format_csv
from shardmark.report.table.sections import Section
from shardmark.report.table.sections import TextTable as Table
from shardmark.report.views.links import links_section
from shardmark.report.views.network import network_json, network_section
from shardmark.report.views.network_traffic import (
    collectives_section,
    interfaces_section,
    ranks_section,
    traffic_json,
    way_values,
)
from shardmark.results.network import NETWORK_FILE, NetworkRecord, read_network
from shardmark.results.store import LINKS_REASON, RunFolder

HOW_TO_MEASURE = (
    f"No {NETWORK_FILE} is stored with this run: measure.link_seconds measures links before the"
    " trials, `shardmark doctor --network --run RUN` at any time."
)


def network_sections(comparison: Comparison) -> list[Section]:
    """Bytes against formula, collectives, interfaces, ranks, and each run's links."""
    found = _several_ranks(comparison.rows)
    traffic = [traffic_of(row) for row in found]
    wires = [one for one in wires_of(comparison.rows) if one.row in found]
    parts = [
        network_section(comparison),
        collectives_section(wires),
        interfaces_section(traffic) if traffic else None,
        ranks_section(traffic),
        *(_links(folder) for folder in _folders(comparison.rows)),
    ]
    return [part for part in parts if part is not None]


def network_data(comparison: Comparison) -> dict[str, object]:
    """`rows`: one mapping for each row; `links`: one for each run that has measured them."""
    rows = [row for row in comparison.rows if row.ok_trials]
    traffic = [traffic_json(traffic_of(row)) for row in rows]
    return {
        "rows": [
            wire | own | {"missing": {**_mapping(wire["missing"]), **_mapping(own["missing"])}}
            for wire, own in zip(network_json(comparison), traffic, strict=True)
        ],
        "links": [
            {"run": str(folder)} | _links_json(folder) for folder in _folders(comparison.rows)
        ],
    }


def network_csv(comparison: Comparison) -> str:
    """One line for each node and interface of each row; one alone where none was sampled."""
    wires = wires_of(comparison.rows)
    keys = dict.fromkeys(key for one in wires for key in identity_of(one.row))
    lines = [line for one in wires for line in _csv_lines(one, traffic_of(one.row))]
    names = ("formula_bytes", "collective_bytes", "collective_ratio")
    ways = [
        name
        for way in ("sent", "received")
        for name in (
            *estimate_columns(f"{way}_step_bytes"),
            *(f"{way}_{key}" for key in _WAY_NAMES),
        )
    ]
    sent = (*estimate_columns("interface_bytes"), "interface_ratio", "backend_ratio")
    return format_csv(lines, [*keys, *names, *sent, "node", "interface", *ways])


_WAY_NAMES = ("mean_bytes_per_second", "peak_bytes_per_second", "busy_share")


def _csv_lines(wire: WireOfRow, traffic: TrafficOfRow) -> Iterable[dict[str, object]]:
    whole: dict[str, object] = identity_of(wire.row) | {
        "formula_bytes": wire.defined_bytes,
        "collective_bytes": wire.counted_bytes,
        "collective_ratio": wire.counted_ratio,
        **dict(flat("interface_bytes", wire.interface_bytes)),
        "interface_ratio": wire.interface_ratio,
        "backend_ratio": wire.backend_ratio,
    }
    if not traffic.interfaces:
        yield whole
    for one in traffic.interfaces:
        line = whole | {"node": one.node, "interface": one.name}
        for name, way in (("sent", one.sent), ("received", one.received)):
            line |= dict(flat(f"{name}_step_bytes", way.step_bytes))
            line |= {f"{name}_{key}": value for key, value in way_values(way).items()}
        yield line


def _several_ranks(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if any(len(trial.ranks) > 1 for trial in row.ok_trials)]


def _folders(rows: Sequence[Row]) -> list[Path]:
    return list(dict.fromkeys(row.folder for row in rows if row.folder is not None))


def links_of(folder: Path) -> NetworkRecord | str:
    """The run's record, or why there is none."""
    try:
        record = read_network(folder)
    except InputError as error:
        return f"{error}."
    if record is not None:
        return record
    reason = RunFolder(folder).read_environment().get(LINKS_REASON)
    return HOW_TO_MEASURE if reason is None else f"Links could not be measured: {reason}."


def _links(folder: Path) -> Section:
    record = links_of(folder)
    if isinstance(record, str):
        return Section(title=f"Links, {folder.name}", table=Table(columns=(), notes=(record,)))
    return links_section(record)


def _links_json(folder: Path) -> dict[str, object]:
    record = links_of(folder)
    if isinstance(record, str):
        return {"record": None, "missing": record}
    return {"record": record.model_dump(mode="json"), "missing": None}


def _mapping(value: object) -> dict[str, object]:
    assert isinstance(value, dict), "both parts name what they lack"
    return value
