"""The network while rows trained: by interface and node, by rank, and by kind of collective."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from shardmark.analysis.compare.rows import Row
from shardmark.analysis.network.traffic import Interface, OfRank, OneWay, TrafficOfRow
from shardmark.analysis.network.wire import Kind, WireOfRow
from shardmark.analysis.statistics.intervals import Estimate
from shardmark.report.table.gaps import where
from shardmark.report.table.sections import (
    Section,
    variants,
)
from shardmark.report.table.sections import (
    TextColumn as Column,
)
from shardmark.report.table.sections import (
    TextTable as Table,
)
from shardmark.report.table.table import NOTHING, number

MEGABYTE = 1e6
INTERFACES_NOTE = (
    "sent, received: MB that the interface's counters rose in the time of a step, of all ranks on"
    " the node and all other programs there. MB/s: mean of the measured windows, and the most"
    " between two samplings. busy: share of the windows' time at more than half of that peak. lo is"
    " the loopback, which joins ranks of one node."
)
RANKS_NOTE = (
    "MB in the time of a step over the rank's own TCP connections: what it handed to the kernel,"
    " without headers."
)
KINDS_NOTE = (
    "What a training rank calls in one step: of every kind, calls and the MB of the tensors that it"
    " hands in (its own part for a gather), as the probe counted them, beside the formula's MB."
)


def interfaces_section(found: Sequence[TrafficOfRow]) -> Section:
    """One line for each node and interface of each row."""
    listed = [(one.row, interface) for one in found for interface in one.interfaces]
    columns = (
        *_whose([row for row, _ in listed]),
        _column("node", listed, lambda one: str(one.node)),
        _column("interface", listed, lambda one: one.name, numeric=False),
        *_one_way("sent", listed, lambda one: one.sent),
        *_one_way("received", listed, lambda one: one.received),
    )
    notes = [INTERFACES_NOTE] if listed else ["No interface was sampled."]
    notes += _missing(found, "peaks", "Peak and busy left out")
    if not any(one.ranks for one in found):
        notes += _missing(found, "ranks")
    return Section(
        title="Bandwidth by interface",
        table=Table(columns=columns, notes=(*notes, *_missing(found, "interfaces"))),
    )


def ranks_section(found: Sequence[TrafficOfRow]) -> Section | None:
    """One line for each rank and interface; None where the samples tell of no rank."""
    listed = [(one.row, rank) for one in found for rank in one.ranks]
    if not listed:
        return None
    columns = (
        *_whose([row for row, _ in listed]),
        _of_rank("rank", listed, lambda one: str(one.rank)),
        _of_rank("role", listed, lambda one: one.role, numeric=False),
        _of_rank("node", listed, lambda one: str(one.node)),
        _of_rank("interface", listed, lambda one: one.interface, numeric=False),
        _of_rank("sent\nMB", listed, lambda one: _estimated(one.sent_bytes)),
        _of_rank("received\nMB", listed, lambda one: _estimated(one.received_bytes)),
    )
    return Section(
        title="Bytes by rank and interface",
        table=Table(columns=columns, notes=(RANKS_NOTE, *_missing(found, "ranks"))),
    )


def collectives_section(found: Sequence[WireOfRow]) -> Section | None:
    """One line for each kind of each row; None where no row called or defines any."""
    listed = [(one.row, kind) for one in found for kind in one.kinds]
    if not listed:
        return None
    columns = (
        *_whose([row for row, _ in listed]),
        _of_kind("collective", listed, lambda one: one.kind.replace("_", " "), numeric=False),
        _of_kind("calls", listed, lambda one: _calls(one.counted_calls)),
        _of_kind("MB", listed, lambda one: _megabytes(one.counted_bytes)),
        _of_kind("formula\nMB", listed, lambda one: _megabytes(one.defined_bytes)),
    )
    return Section(title="Collectives of a step", table=Table(columns=columns, notes=(KINDS_NOTE,)))


def traffic_json(found: TrafficOfRow) -> dict[str, object]:
    """Base units; the series are seconds since the first step, and bytes per second."""
    return {
        "interfaces": [
            {
                "node": one.node,
                "interface": one.name,
                "ranks": one.ranks,
                "sent": _way_json(one.sent),
                "received": _way_json(one.received),
            }
            for one in found.interfaces
        ],
        "ranks": [
            {
                "rank": one.rank,
                "role": one.role,
                "node": one.node,
                "interface": one.interface,
                "sent_step_bytes": estimate_json(one.sent_bytes),
                "received_step_bytes": estimate_json(one.received_bytes),
            }
            for one in found.ranks
        ],
        "missing": dict(found.missing),
    }


def way_values(way: OneWay) -> dict[str, float | None]:
    """What has one number."""
    return {
        "mean_bytes_per_second": way.mean_bytes_per_second,
        "peak_bytes_per_second": way.peak_bytes_per_second,
        "busy_share": way.busy_share,
    }


def estimate_json(found: Estimate | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {"value": found.value, "low": found.low, "high": found.high, "n": found.n}


def _way_json(way: OneWay) -> dict[str, object]:
    return {
        "step_bytes": estimate_json(way.step_bytes),
        **way_values(way),
        "over_time": {
            "seconds": list(way.over_time.x),
            "bytes_per_second": list(way.over_time.y),
        },
    }


def _whose(rows: Sequence[Row]) -> list[Column]:
    return [
        Column(title="strategy", cells=tuple(row.label for row in rows), numeric=False, key=True),
        *variants(rows),
        Column(title="ranks", cells=tuple(str(row.world_size) for row in rows), key=True),
    ]


def _one_way(
    name: str, listed: Sequence[tuple[Row, Interface]], way_of: Callable[[Interface], OneWay]
) -> list[Column]:
    def column(title: str, text_of: Callable[[OneWay], str]) -> Column:
        return _column(title, listed, lambda one: text_of(way_of(one)))

    return [
        column(f"{name}\nMB", lambda way: _estimated(way.step_bytes)),
        column(f"{name} mean\nMB/s", lambda way: _speed(way.mean_bytes_per_second)),
        column(f"{name} peak\nMB/s", lambda way: _speed(way.peak_bytes_per_second)),
        column("busy\n%", lambda way: _percent(way.busy_share)),
    ]


def _column(
    title: str,
    listed: Sequence[tuple[Row, Interface]],
    text_of: Callable[[Interface], str],
    numeric: bool = True,
) -> Column:
    cells = tuple(text_of(one) for _, one in listed)
    return Column(title=title, cells=cells, numeric=numeric, key=title in ("node", "interface"))


def _of_rank(
    title: str,
    listed: Sequence[tuple[Row, OfRank]],
    text_of: Callable[[OfRank], str],
    numeric: bool = True,
) -> Column:
    return Column(title=title, cells=tuple(text_of(one) for _, one in listed), numeric=numeric)


def _of_kind(
    title: str,
    listed: Sequence[tuple[Row, Kind]],
    text_of: Callable[[Kind], str],
    numeric: bool = True,
) -> Column:
    return Column(title=title, cells=tuple(text_of(one) for _, one in listed), numeric=numeric)


def _missing(found: Sequence[TrafficOfRow], what: str, said: str = "Not known") -> list[str]:
    reasons: dict[str, list[str]] = {}
    for one in found:
        if what in one.missing:
            reasons.setdefault(one.missing[what], []).append(one.row.place)
    return [f"{said}: {text}{where(places, len(found))}." for text, places in reasons.items()]


def _estimated(found: Estimate | None) -> str:
    if found is None or found.half_width is None:
        return _megabytes(None if found is None else found.value)
    return f"{found.value / MEGABYTE:.2f} ±{found.half_width / MEGABYTE:.2f}"


def _megabytes(value: float | None) -> str:
    return NOTHING if value is None else f"{value / MEGABYTE:.2f}"


def _calls(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.4g}"


def _speed(value: float | None) -> str:
    return NOTHING if value is None else number(value / MEGABYTE)


def _percent(share: float | None) -> str:
    return NOTHING if share is None else f"{100 * share:.0f}"
