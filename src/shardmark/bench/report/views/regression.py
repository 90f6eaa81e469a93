"""Compares two runs of one experiment: changes of cells, verdict, differences of the runs."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from shardmark.base.metrics import METRICS
from shardmark.base.table.formats import records
from shardmark.base.table.table import Column, Table, for_items, for_programs, metric
from shardmark.base.text import counted
from shardmark.bench.analysis.compare.regression import Change, ChangedCell, Regression
from shardmark.bench.analysis.compare.rows import main_rate
from shardmark.bench.report.table.row_columns import table_by_row

NAMED = 3
"""Largest number of regressed cells that have a line of their own."""


def regression_lines(regression: Regression) -> list[str]:
    """Return the answer: what regressed, that nothing is shown to, or that nothing is decided."""
    cells, regressed = regression.cells, regression.regressions
    lines = [f"REGRESSION: {cell.after.place}, {_change_text(cell)}." for cell in regressed[:NAMED]]
    if len(regressed) > NAMED:
        lines.append(f"REGRESSION: {len(regressed) - NAMED} more.")
    if not lines:
        percent = f"{100 * regression.threshold:g} %"
        count = counted(len(cells), "cell")
        answer = "No regression beyond {} shown in {}."
        if not regression.decided:
            answer = "Nothing is decided: a change of {} is neither shown nor excluded in {}."
        lines.append(answer.format(percent, count))
    open_ = [cell for cell in cells if cell.change is Change.OPEN]
    if open_:
        reasons = "; ".join(dict.fromkeys(cell.reason for cell in open_ if cell.reason))
        lines.append(f"Not decided: {len(open_)} of {len(cells)} ({reasons}).")
    surer = regression.advice()
    if surer is not None:
        lines.append(f"{surer}.")
    return lines


def _change_text(cell: ChangedCell) -> str:
    if cell.ratio is None:
        return f"{cell.change} ({cell.reason})"
    ratio = cell.ratio
    interval = "" if ratio.low is None else f" ({ratio.low:.3f} to {ratio.high:.3f})"
    return f"{ratio.value:.3f}x{interval}"


def regression_table(regression: Regression) -> Table:
    """Return a table with a line for each cell, the worst change first."""
    order = list(Change)
    cells = sorted(regression.cells, key=lambda cell: order.index(cell.change))
    # The verdict is from samples/s; the main rate changes by the same ratio.
    rate = main_rate([row for cell in cells for row in (cell.before, cell.after)])
    only = {"before": regression.only_before, "after": regression.only_after}
    return table_by_row(
        f"{regression.before.path.name} (before) and {regression.after.path.name} (after)",
        [(cell.after, cell) for cell in cells],
        [
            *(
                pair
                for side in ("before", "after")
                for pair in for_items(
                    [metric(rate, key=side, title=side, interval="")], attrgetter(side)
                )
            ),
            (Column("ratio", decimals=3, interval="to", estimated=True), lambda cell: cell.ratio),
            (Column("peak_ratio", "peak", decimals=2), lambda cell: cell.memory_ratio),
            (Column("change", numeric=False), lambda cell: str(cell.change)),
            (for_programs("reason"), lambda cell: cell.reason),
        ],
        [
            f"before, after: {METRICS[rate].unit}. ratio: after / before, 95 % interval."
            " peak: ratio of peak memory.",
            *_run_differences(regression),
            *(f"Only {side}: {'; '.join(places)}." for side, places in only.items() if places),
        ],
    )


def _run_differences(regression: Regression) -> list[str]:
    """Return what differs between the runs, and what cannot be compared."""
    changes = list(regression.content or ())
    for key, (before, after) in regression.differences.items():
        changes.append(f"{key} {before} -> {after}")
    lines = [f"Changed between the runs: {'; '.join(changes)}."] if changes else []
    if regression.content is None:
        lines.append("Code and data are not compared: a run has no readable fingerprint.json.")
    return lines or ["Code, data and environment are the same."]


def regression_json(regression: Regression) -> dict[str, Any]:
    return {
        "regression": bool(regression.regressions),
        "decided": regression.decided,
        "surer": regression.advice(),
        "content": None if regression.content is None else list(regression.content),
        "threshold": regression.threshold,
        "cells": records(regression_table(regression)),
        "only_before": list(regression.only_before),
        "only_after": list(regression.only_after),
        "differences": {
            key: {"before": before, "after": after}
            for key, (before, after) in regression.differences.items()
        },
    }
