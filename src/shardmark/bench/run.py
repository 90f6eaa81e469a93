"""Shardmark from Python: run an experiment, load a run, look at it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardmark.base.results.store import Damaged, StoredRun, load_run
from shardmark.base.system.extras import require
from shardmark.base.text import one_line

if TYPE_CHECKING:
    import pandas as pd

    from shardmark.base.results.schema import TrialResult
    from shardmark.bench.analysis.compare.comparison import Comparison
    from shardmark.bench.report.answers.answers import Answer
    from shardmark.bench.report.export.tables import By
    from shardmark.experiment.experiment import Experiment


@dataclass(frozen=True, repr=False)
class Run:
    """A stored run, as it was when it was loaded.  `print(run)` shows its answers and its table."""

    stored: StoredRun

    def __repr__(self) -> str:
        outcomes = Counter(str(trial.outcome) for trial in self.trials)
        counts = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.items())
        return f"<Run {str(self.path)!r}: {counts or 'no trials'}>"

    def __str__(self) -> str:
        from shardmark.bench.report.answers.overview import overview

        return overview(self._comparison).rstrip("\n")

    def _repr_html_(self) -> str:
        """Return the answers and the table below them, as a notebook shows them."""
        from shardmark.bench.report.answers.answers import answer_lines
        from shardmark.bench.report.table.comparison import comparison_table

        lines = "<br>".join(escape(one_line(line)) for line in answer_lines(self._comparison))
        columns, rows = comparison_table(self._comparison).for_people()
        titles = [f"{column.title} {column.unit}".strip() for column in columns]
        lines_of_cells = [_html_row("th", titles), *(_html_row("td", row) for row in rows)]
        table = f"<table>{''.join(lines_of_cells)}</table>" if rows else ""
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
        """Stored trials that are damaged, with the reason; running again repeats them."""
        return self.stored.damaged

    def compare(self, baseline: str | None = None) -> Comparison:
        """Compare the trials' cells: intervals, speed-up and scaling efficiency.

        Raises `InputError` for a baseline strategy that was not measured.
        """
        from shardmark.bench.analysis.compare.comparison import compare

        return compare([self.stored], baseline)

    @cached_property
    def _comparison(self) -> Comparison:
        return self.compare()

    def answers(self) -> list[Answer]:
        """Return cautions, then the fastest, the least memory, and whether all train the same."""
        from shardmark.bench.report.answers.answers import answers

        return answers(self._comparison)

    @property
    def verdict(self) -> Answer:
        """The fastest `strategy`, whether it is `decided`, and a `text` that names its rival."""
        from shardmark.bench.report.answers.answers import Answer

        for answer in self.answers():
            if answer.question == "fastest":
                return answer
        text = "no trial has a result"
        return Answer(question="fastest", decided=False, strategy=None, text=text)

    def table(self, *columns: str, baseline: str | None = None) -> pd.DataFrame:
        """Return a row for each strategy and number of ranks, the fastest first, in base units.

        `columns` are those of `compare --columns`; NAME_low and NAME_high have an interval's ends.
        Raises `InputError` for a column or a baseline that does not exist.
        """
        require("pandas", needed_for="table")
        import pandas as pd

        from shardmark.base.table.table import Missing
        from shardmark.bench.report.table.comparison import BRIEF, comparison_table

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

    def view(self, name: str, *, baseline: str | None = None) -> dict[str, pd.DataFrame]:
        """Return the tables of `compare --view NAME` by their titles, in base units.

        `name` is, for example, `when`, `effort` or `study:lamsal-2025`.  Raises `InputError` for
        another name.
        """
        require("pandas", needed_for="view")
        import pandas as pd

        from shardmark.base.table.formats import base_rows
        from shardmark.base.table.table import Missing
        from shardmark.bench.report.views.registry import find_view

        view, value = find_view(name)
        frames = {}
        for table in view.tables(self.compare(baseline), value):
            header, lines = base_rows([table])
            rows = [[line.get(key) for key in header] for line in lines]
            cells = [[None if isinstance(v, Missing) else v for v in row] for row in rows]
            frames[table.title] = pd.DataFrame(cells, columns=header)
        return frames

    def report(
        self,
        out: str | Path | None = None,
        *,
        baseline: str | None = None,
        images: bool = True,
        predicted: bool = False,
        against: str | None = None,
    ) -> Path:
        """Write the report page, `report.html` in the run's folder by default; return its path.

        `predicted` also draws what `plan` predicts against what was measured; `against` is
        the name of a published study, whose tables, figures and claims are added.
        """
        from shardmark.bench.report.page.page import default_out, study_part, write_report

        page = default_out([self.path]) if out is None else Path(out).expanduser()
        comparison = self.compare(baseline)
        part_of = None if against is None else study_part(against, "against")
        write_report(
            [self.stored],
            comparison,
            page,
            images=images,
            predicted=predicted,
            against=None if part_of is None else part_of(comparison),
        )
        return page

    def to_pandas(self, by: By = "trial") -> pd.DataFrame:
        """Return a row for each trial: its cell, its outcome, and the value of every metric or NaN.

        `by` is `trial`, or the long form of the trials that ended ok: `epoch` (counted from 1; no
        rows where the recipe counts steps), `step` (a row for each rank and step), or `sample` (a
        row for each sampling and rank, interface, GPU, or the machine).  Values are in base units,
        which `frame.attrs["units"]` names.

        Raises `InputError` for another `by`, or a raw file that is damaged.
        """
        from shardmark.bench.report.export.tables import Source, frame_of

        return frame_of([Source(self.stored, self.path.resolve().name)], by)


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
    or a function, also one of this notebook or script.  `progress=False` prints only failures.
    `retry` also repeats failed, timed-out and disturbed trials; `remeasure` moves the stored
    results to `set-aside` and measures everything anew; `budget` (seconds, or `"30m"`) starts no
    trial that is not expected to end within it.

    Raises `InputError` for what cannot be run, `KeyboardInterrupt` after storing an interrupted
    trial; call it again with the same `out` to run the trials that are missing.
    """
    from shardmark.base.durations import parse_seconds
    from shardmark.base.results.runs_folder import run_folder
    from shardmark.bench.launch.run_options import RunOptions
    from shardmark.bench.launch.session import run_experiment
    from shardmark.bench.progress.display import listener
    from shardmark.experiment.model_source import resolve_experiment

    if isinstance(budget, str):
        budget = parse_seconds(budget, "budget")
    path = None if out is None else Path(out).expanduser()
    resolved = resolve_experiment(experiment, overrides, path)
    options = RunOptions(
        retry=retry, remeasure=remeasure, budget_seconds=budget, quiet=not progress
    )
    with run_folder(path, resolved.name) as folder, listener(folder, options) as progress_listener:
        run_experiment(resolved, folder, options, listener=progress_listener)
    return load(folder)


def _html_row(tag: str, cells: Sequence[str]) -> str:
    return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"
