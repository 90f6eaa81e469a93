"""Runs that several verbs load."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardmark.base.results.store import StoredRun


def load_runs(runs: Sequence[Path] | None) -> list[StoredRun]:
    """Load each folder once, or the latest run.  Raises `InputError` for a folder without a run."""
    from shardmark.base.results.runs_folder import latest_run
    from shardmark.base.results.store import load_run

    folders = {path.resolve(): path for path in runs or [latest_run()]}
    return [load_run(path) for path in folders.values()]
