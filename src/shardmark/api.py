"""Shardmark from Python: run an experiment, load a run, look at it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardmark.results.store import Damaged, StoredRun, load_run

if TYPE_CHECKING:
    import pandas as pd

    from shardmark.analysis.comparison import Comparison
    from shardmark.experiment.schema import Experiment
    from shardmark.results.schema import TrialResult


@dataclass(frozen=True, slots=True)
class Run:
    """A run as it was stored when it was loaded."""

    stored: StoredRun

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
        from shardmark.analysis.comparison import compare

        return compare([self.stored], baseline)

    def to_pandas(self) -> pd.DataFrame:
        """One row a trial: what it was, how it ended, and every metric's value or NaN."""
        import pandas as pd

        from shardmark.analysis.rows import other_varied, plain
        from shardmark.measure.metrics import TRIAL_METRICS

        recorded = dict.fromkeys(name for result in self.trials for name in result.metrics)
        names = list(dict.fromkeys((*TRIAL_METRICS, *recorded)))
        varied = list(dict.fromkeys(key for result in self.trials for key in other_varied(result)))
        columns: dict[str, list[Any]] = {
            "id": [result.id for result in self.trials],
            "strategy": [result.strategy for result in self.trials],
            "strategy_options": [plain(result.strategy_options) for result in self.trials],
            "world_size": [result.world_size for result in self.trials],
            "precision": [result.precision for result in self.trials],
            **{key: [result.varied.get(key) for result in self.trials] for key in varied},
            "synthetic": [result.synthetic for result in self.trials],
            "outcome": [str(result.outcome) for result in self.trials],
            "repeat": [result.repeat for result in self.trials],
        }
        for name in names:
            summaries = (result.metrics.get(name) for result in self.trials)
            columns[name] = [
                float("nan") if summary is None else summary.value for summary in summaries
            ]
        return pd.DataFrame(columns)


def load(path: str | Path) -> Run:
    """Read a run's folder.  Raises `InputError` if it is none."""
    return Run(load_run(Path(path).expanduser()))


def run(
    experiment: str | Path | Mapping[str, Any] | Experiment, out: str | Path | None = None
) -> Run:
    """Run every trial of an experiment that has no result in `out` yet, and load the run.

    `experiment` is a YAML file, the name of a preset, its content as a mapping, or an `Experiment`;
    `out` is a folder, a new one in `runs/` by default.  Raises `InputError` where they are wrong.
    """
    from shardmark.launch.controller import fresh_folder, run_experiment

    resolved = _resolve(experiment)
    folder = fresh_folder(resolved.name) if out is None else Path(out).expanduser()
    return load(run_experiment(resolved, folder))


def _resolve(experiment: str | Path | Mapping[str, Any] | Experiment) -> Experiment:
    from shardmark.experiment.load import from_mapping, load_experiment

    if isinstance(experiment, str | Path):
        return load_experiment(experiment)
    if isinstance(experiment, Mapping):
        return from_mapping(experiment)
    return experiment
