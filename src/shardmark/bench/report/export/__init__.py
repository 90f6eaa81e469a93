"""Hands finished runs to an experiment tracker, or writes them as CSV files."""

from __future__ import annotations

from collections.abc import Sequence

from shardmark.base.results.store import StoredRun
from shardmark.bench.report.export.tables import ExportSummary, export_csv, sources_of
from shardmark.bench.report.export.trackers import export_trials


def export_runs(runs: Sequence[StoredRun], target: str, out: str | None = None) -> ExportSummary:
    """Hand the runs to the target of that name; a trial that is exported twice is stored once.

    `out` is a folder, a file or a tracking URI; None for the usual place.  Raises `InputError`
    without the target's library, and if `out` does not fit the target.
    """
    sources = sources_of(runs)
    return export_csv(sources, out) if target == "csv" else export_trials(target, sources, out)
