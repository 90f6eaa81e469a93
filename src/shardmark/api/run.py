"""Shardmark from Python: run an experiment, load a run, look at it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardmark.core.text import one_line
from shardmark.results.store import Damaged, StoredRun, load_run

if TYPE_CHECKING:
    import pandas as pd

    from shardmark.analysis.compare.comparison import Comparison
    from shardmark.config.experiment import Experiment
    from shardmark.report.answers.answers import Answer
    from shardmark.report.export.tables import By, Source
    from shardmark.results.schema import TrialResult


@dataclass(frozen=True, repr=False)
class Run:
    """A run as it was stored when it was loaded.  `print(run)` shows its answers and its table."""

    stored: StoredRun

    def __repr__(self) -> str:
        outcomes = Counter(str(trial.outcome) for trial in self.trials)
        counts = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.items())
        return f"<Run {str(self.path)!r}: {counts or 'no trials'}>"

    def __str__(self) -> str:
        from shardmark.report.answers.overview import overview

        return overview(self._comparison).rstrip("\n")

    def _repr_html_(self) -> str:
        """What a notebook shows: the answers, and the table below them."""
        import pandas as pd

        from shardmark.report.answers.answers import answer_lines
        from shardmark.report.table.comparison import comparison_table

        lines = "<br>".join(escape(one_line(line)) for line in answer_lines(self._comparison))
        columns, rows = comparison_table(self._comparison).for_people()
        titles = [f"{column.title} {column.unit}".strip() for column in columns]
        table = pd.DataFrame(rows, columns=titles).to_html(index=False, border=0) if rows else ""
        return f"<p>{lines or escape(repr(self))}</p>{table}"

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

    @cached_property
    def _comparison(self) -> Comparison:
        return self.compare()

    def answers(self) -> list[Answer]:
        """Cautions, then what is fastest, what needs least memory, and whether all train alike."""
        from shardmark.report.answers.answers import answers

        return answers(self._comparison)

    @property
    def verdict(self) -> Answer:
        """The fastest: its `strategy`, whether that is `decided`, and a `text` with the rival."""
        from shardmark.report.answers.answers import Answer

        for answer in self.answers():
            if answer.question == "fastest":
                return answer
        text = "no trial has a result"
        return Answer(question="fastest", decided=False, strategy=None, text=text)

    def table(self, *columns: str, baseline: str | None = None) -> pd.DataFrame:
        """One row a strategy and number of ranks, the fastest first, in base units.

        `columns` are those of `compare --columns`; an interval is in NAME_low and NAME_high.
        Raises `InputError` for a column or a baseline that does not exist.
        """
        import pandas as pd

        from shardmark.report.table.comparison import BRIEF, comparison_table
        from shardmark.report.table.table import Missing

        comparison = self._comparison if baseline is None else self.compare(baseline)
        table = comparison_table(comparison, columns or BRIEF)
        varied = dict.fromkeys(key for row in comparison.rows for key in row.varied)
        frame: dict[str, list[object]] = {"strategy": [*table.values("label")]}
        keys = ("world_size", *varied) if table.rows else ()
        frame |= {key: [*table.values(key)] for key in keys}
        for column in table.columns:
            if column.names_row or column.shown_to == "programs":
                continue
            values = table.values(column.key)
            if column.estimated:
                for end in ("value", "low", "high"):
                    name = column.key if end == "value" else f"{column.key}_{end}"
                    frame[name] = [getattr(value, end, None) for value in values]
            else:
                frame[column.key] = [None if isinstance(v, Missing) else v for v in values]
        return pd.DataFrame(frame)

    def report(
        self,
        out: str | Path | None = None,
        *,
        baseline: str | None = None,
        images: bool = True,
        predicted: bool = False,
    ) -> Path:
        """Write the report page, `report.html` in the run's folder by default; return its path.

        `predicted` also draws what `plan` predicts against what was measured.
        """
        from shardmark.report.page.page import default_out, write_report

        page = default_out([self.path]) if out is None else Path(out).expanduser()
        comparison = self.compare(baseline)
        return write_report(
            [self.stored], comparison, page, images=images, predicted=predicted
        ).page

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

    def _source(self) -> Source:
        from shardmark.report.export.tables import Source

        return Source(self.stored, self.path.resolve().name)


def load(path: str | Path) -> Run:
    """Read a run's folder.  Raises `InputError` if it is none."""
    return Run(load_run(Path(path).expanduser()))


def run(
    experiment: str | Path | Mapping[str, Any] | Experiment,
    out: str | Path | None = None,
    *,
    progress: bool = True,
    retry: bool = False,
    remeasure: bool = False,
    budget: str | float | None = None,
    **overrides: Any,
) -> Run:
    """Run every trial of an experiment that has no result in `out` yet, and load the run.

    `experiment` is a YAML file, the name of a preset, its content as a mapping, or an `Experiment`;
    `out` is a folder, by default a new one in `runs/`.  Overrides are keys of the file, nested
    (`measure={"repeats": 3}`) or short where that is clear (`steps=200`).  A model may be a class
    or a function, also one of this notebook or script.  `progress=False` tells of failures alone.
    `retry` also repeats failed, timed-out and disturbed trials; `remeasure` keeps what is there
    aside and measures everything anew; no trial is begun that `budget` (seconds, or `"30m"`) has
    no time for.

    Raises `InputError` for what cannot be run, `KeyboardInterrupt` after storing an interrupted
    trial; run again with the same `out`, what is missing is finished.
    """
    from shardmark.api.model_source import by_name
    from shardmark.config.experiment import Experiment
    from shardmark.config.load import resolve
    from shardmark.core.durations import parse_seconds
    from shardmark.launch.controller import run_experiment
    from shardmark.progress.display import listener
    from shardmark.results.runs_folder import RUNS, create_run_folder, remove_if_empty

    if isinstance(budget, str):
        budget = parse_seconds(budget, "budget")
    given = None if out is None else Path(out).expanduser()
    models = (RUNS if given is None else given.parent) / "models"
    if not isinstance(experiment, Experiment):
        experiment = by_name(experiment, models)
    resolved = resolve(experiment, by_name(overrides, models))
    folder = given or create_run_folder(resolved.name)
    fresh = folder if given is None else None
    with (
        remove_if_empty(fresh),
        listener(folder, quiet=not progress, budget_seconds=budget) as told,
    ):
        run_experiment(
            resolved,
            folder,
            progress=told,
            retry=retry,
            remeasure=remeasure,
            budget_seconds=budget,
        )
    return load(folder)
