"""Bytes on the network, row by row: what the strategy's formula says beside what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardmark.analysis.compare.comparison import Comparison
from shardmark.analysis.network.wire import WireOfRow, wires_of
from shardmark.analysis.statistics.intervals import Estimate
from shardmark.report.table.columns import identity_of
from shardmark.report.table.gaps import left_out, where
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
from shardmark.report.table.table import NOTHING

MEGABYTE = 1e6
EXPLANATION = (
    "MB (10^6 bytes) that the network carries for one training rank in one step. formula: by the"
    " strategy's definition. collectives: those that a probed step called, each moving what it must"
    " and no more. interfaces: sent over all interfaces of the hosts in the measured steps, headers"
    " and other programs included. Ratios are to the formula; interfaces / collectives is what the"
    " backend and the protocols add."
)
LETTERS = "n ranks; P bytes of all parameters, G of the trained ones' gradients."


def network_section(comparison: Comparison) -> Section:
    """Formula, measured and ratio of every row that sends anything."""
    found = [one for one in wires_of(comparison.rows) if not _silent(one)]
    rows = [one.row for one in found]
    columns = (
        Column(title="strategy", cells=tuple(row.label for row in rows), numeric=False),
        *variants(rows),
        Column(title="ranks", cells=tuple(str(row.world_size) for row in rows)),
        Column(title="formula\nMB", cells=tuple(_megabytes(one.defined_bytes) for one in found)),
        Column(
            title="collectives\nMB", cells=tuple(_megabytes(one.counted_bytes) for one in found)
        ),
        Column(title="ratio", cells=tuple(_times(one.counted_ratio) for one in found)),
        Column(title="interfaces\nMB", cells=tuple(_sent(one) for one in found)),
        Column(title="ratio", cells=tuple(_times(one.interface_ratio) for one in found)),
        Column(
            title="interfaces /\ncollectives",
            cells=tuple(_times(one.backend_ratio) for one in found),
        ),
    )
    return Section(
        title="Bytes on the network",
        table=Table(columns=columns, notes=(*_notes(found), *left_out(comparison.rows))),
    )


def network_json(comparison: Comparison) -> list[dict[str, object]]:
    """One mapping for each row, bytes per training rank and step."""
    return [
        identity_of(one.row)
        | {
            "formula": None if one.wire is None else one.wire.formula,
            "formula_bytes": one.defined_bytes,
            "collective_bytes": one.counted_bytes,
            "collective_ratio": one.counted_ratio,
            "interface_bytes": _estimate(one.interface_bytes),
            "interface_ratio": one.interface_ratio,
            "backend_ratio": one.backend_ratio,
            "kinds": {
                kind.kind: {
                    "ranks": kind.ranks,
                    "formula_payload_bytes": kind.defined_bytes,
                    "counted_payload_bytes": kind.counted_bytes,
                    "counted_calls": kind.counted_calls,
                }
                for kind in one.kinds
            },
            "missing": dict(one.missing),
        }
        for one in wires_of(comparison.rows)
    ]


def _silent(one: WireOfRow) -> bool:
    """Of one process, which sends nothing to anybody."""
    return all(len(trial.ranks) == 1 for trial in one.row.ok_trials)


def _notes(found: Sequence[WireOfRow]) -> list[str]:
    if not found:
        return ["No trial of several ranks ended ok."]
    notes = [EXPLANATION]
    formulas: dict[str, list[str]] = {}
    remarks: dict[str, list[str]] = {}
    for one in found:
        if one.wire is not None:
            formulas.setdefault(one.wire.formula, []).append(one.row.strategy)
            if one.wire.note is not None:
                remarks.setdefault(one.wire.note, []).append(one.row.strategy)
    if formulas:
        notes.append(LETTERS)
    notes += (f"Formula of {_names(names)}: {text}." for text, names in formulas.items())
    notes += (f"{_names(names)}: {text}." for text, names in remarks.items())
    reasons: dict[str, list[str]] = {}
    for one in found:
        for name, reason in one.missing.items():
            reasons.setdefault(f"Not known: {name}: {reason}", []).append(one.row.place)
    return [*notes, *(f"{text}{where(places, len(found))}." for text, places in reasons.items())]


def _names(names: Sequence[str]) -> str:
    return ", ".join(dict.fromkeys(names))


def _megabytes(value: float | None) -> str:
    return NOTHING if value is None else f"{value / MEGABYTE:.2f}"


def _sent(one: WireOfRow) -> str:
    sent = one.interface_bytes
    if sent is None or sent.half_width is None:
        return _megabytes(None if sent is None else sent.value)
    return f"{_megabytes(sent.value)} ±{sent.half_width / MEGABYTE:.2f}"


def _times(ratio: float | None) -> str:
    return NOTHING if ratio is None else f"{ratio:.2f}"


def _estimate(found: Estimate | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {"value": found.value, "low": found.low, "high": found.high, "n": found.n}
