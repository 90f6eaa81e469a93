"""Two runs of one experiment: each cell's change, a verdict, and what differs between the runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardmark.analysis.compare.regression import Change, ChangedCell, Regression
from shardmark.analysis.compare.rows import main_rate
from shardmark.core.metrics import METRICS
from shardmark.report.table.columns import for_items, metric, table_by_row
from shardmark.report.table.formats import records
from shardmark.report.table.table import Column, Table

NAMED = 3
"""Cells named in a line; the table has all."""


def regression_lines(regression: Regression) -> list[str]:
    """The answer: what regressed, or that nothing is shown to."""
    cells = regression.cells
    percent = f"{100 * regression.threshold:g} %"
    lines = [
        f"REGRESSION: {cell.after.place}, {_how(cell)}." for cell in regression.regressions[:NAMED]
    ]
    more = len(regression.regressions) - NAMED
    if more > 0:
        lines.append(f"REGRESSION: {more} more.")
    if not lines:
        lines.append(f"No regression beyond {percent} shown in {len(cells)} cells.")
    open_ = [cell for cell in cells if cell.change is Change.OPEN]
    if open_:
        reasons = "; ".join(dict.fromkeys(cell.reason for cell in open_ if cell.reason))
        lines.append(f"Not decided: {len(open_)} of {len(cells)} ({reasons}).")
    return lines


def regression_table(regression: Regression) -> Table:
    """One line a cell, the worst change first."""
    order = list(Change)
    rate = _rate(regression)
    cells = sorted(regression.cells, key=lambda cell: order.index(cell.change))
    return table_by_row(
        f"{regression.before.path.name} (before) and {regression.after.path.name} (after)",
        [(cell.after, cell) for cell in cells],
        [
            *(
                for_items([metric(rate, key=name, title=name, interval="")], of)[0]
                for name, of in (("before", lambda c: c.before), ("after", lambda c: c.after))
            ),
            (
                Column(key="ratio", title="ratio", decimals=3, interval="to", estimated=True),
                lambda cell: cell.ratio,
            ),
            (Column(key="peak_ratio", title="peak", decimals=2), lambda cell: cell.memory_ratio),
            (Column(key="change", title="change", numeric=False), lambda cell: str(cell.change)),
            (Column(key="reason", title="reason", shown_to="programs"), lambda cell: cell.reason),
        ],
        _notes(regression),
    )


def regression_json(regression: Regression) -> dict[str, Any]:
    return {
        "regression": bool(regression.regressions),
        "threshold": regression.threshold,
        "cells": records(regression_table(regression)),
        "only_before": list(regression.only_before),
        "only_after": list(regression.only_after),
        "differences": {
            key: {"before": before, "after": after}
            for key, (before, after) in regression.differences.items()
        },
    }


def _rate(regression: Regression) -> str:
    """What is shown: its change is that of samples/s, by which a cell is judged."""
    return main_rate([row for cell in regression.cells for row in (cell.before, cell.after)])


def _how(cell: ChangedCell) -> str:
    if cell.ratio is None:
        return f"{cell.change} ({cell.reason})"
    ratio = cell.ratio
    interval = "" if ratio.low is None else f" ({ratio.low:.3f} to {ratio.high:.3f})"
    return f"{ratio.value:.3f}x{interval}"


def _notes(regression: Regression) -> list[str]:
    differences = [
        f"{key} {before} -> {after}" for key, (before, after) in regression.differences.items()
    ]
    return [
        f"before, after: {METRICS[_rate(regression)].unit}. ratio: after over before, 95 %"
        " interval. peak: of the memory.",
        f"Differs: {'; '.join(differences)}." if differences else "The environments are the same.",
        *_only("before", regression.only_before),
        *_only("after", regression.only_after),
    ]


def _only(when: str, places: Sequence[str]) -> list[str]:
    return [f"Only {when}: {'; '.join(places)}."] if places else []
