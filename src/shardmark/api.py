"""Shardmark from Python: run an experiment, load a run, look at it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardmark.results.store import Damaged, StoredRun, load_run

if TYPE_CHECKING:
    import pandas as pd

    from shardmark.analysis.compare.comparison import Comparison
    from shardmark.config.experiment import Experiment
    from shardmark.report.export.source import Source
    from shardmark.report.export.tables import By
    from shardmark.results.schema import TrialResult


@dataclass(frozen=True, slots=True, repr=False)
class Run:
    """A run as it was stored when it was loaded."""

    stored: StoredRun

    def __repr__(self) -> str:
        outcomes = Counter(str(trial.outcome) for trial in self.trials)
        counts = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.items())
        return f"<Run {str(self.path)!r}: {counts or 'no trials'}>"

    @property
    def path(self) -> Path:
        return self.stored.path

    @property
    def name(self) -> str:
        """The experiment's name."""
        return self.stored.name

    @property
    def trials(self) -> tuple[TrialResult, ...]:
        """Every trial that has a result, in the order in which they were run."""
        return self.stored.trials

    @property
    def damaged(self) -> tuple[Damaged, ...]:
        """Stored trials that must not be believed, and why; running again repeats them."""
        return self.stored.damaged

    def compare(self, baseline: str | None = None) -> Comparison:
        """The trials' cells with intervals, speed-up and scaling efficiency.

        Raises `InputError` for a baseline strategy that was not measured.
        """
        from shardmark.analysis.compare.comparison import compare

        return compare([self.stored], baseline)

    def to_pandas(self, by: By = "trial") -> pd.DataFrame:
        """One row a trial: what it was, how it ended, and every metric's value or NaN.

        `by` is `trial`, or the long form of the trials that ended ok: `epoch` (counted from 1; none
        where the recipe counts steps), `step` (one row a rank and step), or `sample` (one row a
        sampling and rank, interface, GPU, or the machine).  Base units, named in
        `frame.attrs["units"]`.

        Raises `InputError` for another `by`, or a raw file that is damaged.
        """
        from shardmark.report.export.tables import frame_of

        return frame_of([self._source()], by)

    def to_parquet(self, path: str | Path) -> None:
        """Write `trials`, `epochs`, `steps` and `samples.parquet` into the folder, typed.

        A `path` that ends in `.parquet` gets the trials alone.  Raises `MissingExtra` without
        pyarrow, and `InputError` where nothing can be written.
        """
        from shardmark.report.export.files import export_parquet

        export_parquet([self._source()], str(path))

    def _source(self) -> Source:
        from shardmark.report.export.source import Source

        return Source(self.stored, self.path.resolve().name)


def load(path: str | Path) -> Run:
    """Read a run's folder.  Raises `InputError` if it is none."""
    return Run(load_run(Path(path).expanduser()))


def run(
    experiment: str | Path | Mapping[str, Any] | Experiment,
    out: str | Path | None = None,
    **overrides: Any,
) -> Run:
    """Run every trial of an experiment that has no result in `out` yet, and load the run.

    `experiment` is a YAML file, the name of a preset, its content as a mapping, or an `Experiment`;
    `out` is a folder, by default a new one in `runs/`.  Overrides are keys of the file, nested
    (`measure={"repeats": 3}`) or short where that is clear (`steps=200`).  Raises `InputError`
    where one of them is wrong.
    """
    from shardmark.config.load import resolve
    from shardmark.launch.controller import run_experiment
    from shardmark.results.runs_folder import fresh_folder

    resolved = resolve(experiment, overrides)
    folder = fresh_folder(resolved.name) if out is None else Path(out).expanduser()
    return load(run_experiment(resolved, folder))
