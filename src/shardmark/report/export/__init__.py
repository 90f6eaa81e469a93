"""A finished run handed to a tracker, or written as tables: one plain table of targets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from shardmark.report.export.tables import (
    Exported,
    Source,
    export_csv,
    export_parquet,
    sources_of,
)
from shardmark.report.export.trackers import export_mlflow, export_tensorboard, export_wandb
from shardmark.results.store import StoredRun

TARGETS: Mapping[str, Callable[[Sequence[Source], str | None], Exported]] = MappingProxyType(
    {
        "tensorboard": export_tensorboard,
        "mlflow": export_mlflow,
        "wandb": export_wandb,
        "parquet": export_parquet,
        "csv": export_csv,
    }
)


def export_runs(runs: Sequence[StoredRun], to: str, out: str | None = None) -> Exported:
    """Hand the runs to the target of that name; exporting a trial twice leaves one record of it.

    `out` is a folder, a file or a tracking URI; None for the usual place.  Raises `InputError`
    without the target's library, and where `out` does not fit.
    """
    return TARGETS[to](sources_of(runs), out)
