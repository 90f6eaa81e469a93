"""Tables of a study in its own layout and units, with the measured values beside its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any

from shardmark.base.table.table import (
    Column,
    Missing,
    Table,
    Value,
    for_programs,
    metric_column,
    number,
    table_of,
)
from shardmark.bench.analysis.compare.epochs import Epoch, epochs_of
from shardmark.bench.analysis.compare.rows import Row
from shardmark.bench.report.views.effort import Effort, efforts_of, listed
from shardmark.extras.studies.against import PEAK, RATE, Against, ratio_to_strategy
from shardmark.extras.studies.study import STATE, Advice, Figures, PaperTable, TableColumn

_name = partial(Column, names_row=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Training:
    """A training of the study or of a run, with its row in each run."""

    strategy: str
    label: str
    """The measured strategy with its options, or the study's name of it."""
    world_size: int
    conditions: str
    figures: Figures | None
    rows: Mapping[str, Row]
    """Experiment of a run -> row."""

    @property
    def epochs(self) -> int:
        """Return the largest number of epochs that are published or measured."""
        published = self.figures.epochs.values() if self.figures else ()
        measured = (epochs_of(row).epochs for row in self.rows.values())
        return max(map(len, (*published, *measured)), default=0)

    @property
    def configuration(self) -> str:
        """Return the study's title of a published training."""
        figures = self.figures
        assert figures is not None, "only published trainings have a configuration"
        return figures.label or f"{figures.title}, {figures.world_size} ranks"

    def published(self, metric: str, epoch: int | None = None) -> Value:
        """Return the study's value, of an epoch from 0 or of the training."""
        if self.figures is None:
            return None
        if epoch is None:
            return self.figures.headline.get(metric)
        value: float | None = _at(self.figures.epochs.get(metric, ()), epoch)
        return value

    def measured(self, experiment: str, metric: str, epoch: int | None = None) -> Value:
        """Return the value of a run, in the same way."""
        row = self.rows.get(experiment)
        if row is None:
            return None
        if epoch is None:
            return row.metrics.get(metric)
        record: Epoch | None = _at(epochs_of(row).epochs, epoch)
        return None if record is None else record.metrics.get(metric)


def paper_tables(against: Against) -> list[Table]:
    """Return the study's tables in its order, then its advice."""
    trainings = _trainings(against)
    tables = []
    for table in against.study.tables:
        shown = [t for t in trainings if not table.strategies or t.strategy in table.strategies]
        if table.lines == "blocks":
            tables += _by_block(against, table, shown)
        elif table.lines == "epochs":
            by_epoch = [(t, epoch) for t in shown for epoch in range(t.epochs)]
            tables.append(_lines(against, table, by_epoch))
        else:
            tables.append(_lines(against, table, [(training, None) for training in shown]))
    return [*tables, *([_advice(against)] if against.study.advice else [])]


def _trainings(against: Against) -> list[_Training]:
    """Return the trainings in the study's order; the same training of several runs is one."""
    trainings: dict[tuple[object, ...], _Training] = {}
    for pair in against.pairs:
        key = (id(pair.figures), pair.title, pair.world_size, pair.conditions)
        rows = {} if pair.row is None else {pair.row.experiment: pair.row}
        strategy = (pair.row and pair.row.strategy) or (pair.figures and pair.figures.strategy)
        training = trainings.get(key) or _Training(
            strategy=strategy or "",
            label=pair.title,
            world_size=pair.world_size,
            conditions=pair.conditions,
            figures=pair.figures,
            rows={},
        )
        trainings[key] = replace(training, rows={**training.rows, **rows})
    return list(trainings.values())


def _sides(against: Against, column: TableColumn, title: str) -> list[tuple[Column, str | None]]:
    """Return the study's column, and that of each run with its experiment."""
    shown = metric_column(
        column.metric, unit=column.unit, scale=column.scale, decimals=column.decimals
    )
    published = replace(
        shown, key=f"{column.metric}_published", title=f"{title} publ.", estimated=False
    )
    sides: list[tuple[Column, str | None]] = [(replace(published, interval=""), None)]
    for experiment, source in against.sources.items():
        several = len(against.sources) > 1
        key = f"{column.metric}_measured{f'_{source}' if several else ''}"
        titled = f"{title} {source if several else 'meas.'}"
        sides.append((replace(shown, key=key, title=titled, interval="±"), experiment))
    return sides


def _lines(
    against: Against, table: PaperTable, lines: Sequence[tuple[_Training, int | None]]
) -> Table:
    """Return a table with a line for each training, or epoch of a training."""
    columns: list[tuple[Column, Callable[[tuple[_Training, int | None]], Value]]] = [
        (for_programs("table"), lambda _: table.title),
        (_name("conditions", numeric=False), lambda line: line[0].conditions),
        (_name("strategy", numeric=False), lambda line: line[0].label),
        (_name("ranks", "GPU Count"), lambda line: line[0].world_size),
        (_name("epoch", "Epoch"), lambda line: None if line[1] is None else line[1] + 1),
    ]
    columns = [pair for pair in columns if any(pair[1](line) not in ("", None) for line in lines)]
    for column in table.columns:
        for shown, experiment in _sides(against, column, column.title):
            columns.append((shown, partial(_value, experiment, column.metric)))
    return table_of(table.title, lines, columns)


def _value(experiment: str | None, metric: str, line: tuple[_Training, int | None]) -> Value:
    training, epoch = line
    if experiment is None:
        return training.published(metric, epoch)
    return training.measured(experiment, metric, epoch)


def _by_block(against: Against, table: PaperTable, trainings: Sequence[_Training]) -> list[Table]:
    """Return a table for each metric: a line for each condition, columns for each configuration.

    Several strategies that the configuration may have been have a column each.
    """
    published = [training for training in trainings if training.figures is not None]
    conditions = list(dict.fromkeys(training.conditions for training in published))
    nameless = {t.label for t in published if t.figures and t.figures.strategy is None}
    labels: dict[str, dict[str, None]] = {}
    for training in published:
        measured = labels.setdefault(training.configuration, {})
        measured.update(dict.fromkeys([training.label] if training.rows else []))

    def value_of(
        configuration: str, label: str | None, experiment: str | None, metric: str, condition: str
    ) -> Value:
        for training in published:
            same = (training.configuration, training.conditions) == (configuration, condition)
            if same and label in (None, training.label):
                return _value(experiment, metric, (training, None))
        return None

    tables = []
    for column in table.columns:
        columns: list[tuple[Column, Callable[[str], Value]]] = [
            (for_programs("table"), lambda _, title=column.title: title),  # type: ignore[misc]
            (_name("conditions", column.title, numeric=False), lambda condition: condition),
        ]
        for configuration, measured in labels.items():
            for label in (None, *measured):
                named = f"{configuration} ({label})" if label in nameless else configuration
                for shown, experiment in _sides(against, column, named):
                    if (label is None) == (experiment is None):
                        keyed = replace(shown, key=f"{named} {shown.key}")
                        value = partial(value_of, configuration, label, experiment, column.metric)
                        columns.append((keyed, value))
        tables.append(table_of(f"{table.title}: {column.title}", conditions, columns))
    return tables


def _advice(against: Against) -> Table:
    """Return the study's recommendations beside ratios to its reference over all cells."""
    reference = against.study.reference
    efforts = efforts_of(against.rows)

    def ratios(metric: str, advice: Advice) -> str | None:
        """Return the range over the cells that the reference has, too."""
        rows = [row for row in against.rows if row.strategy in advice.strategies]
        measured = [ratio_to_strategy(row, against.rows, reference, metric) for row in rows]
        values = sorted(ratio.value for ratio in measured if ratio is not None)
        if not values:
            return None
        ends = list(dict.fromkeys(number(value, decimals=2) for value in (values[0], values[-1])))
        return f"{' to '.join(ends)} ({len(values)})"

    def effort(value_of: Callable[[Effort], Value], advice: Advice) -> str | None:
        """Return the values of the strategies, each once."""
        values = [value_of(effort) for effort in efforts if effort.strategy in advice.strategies]
        texts = (str(value) for value in values if not isinstance(value, Missing))
        return ", ".join(dict.fromkeys(texts)) or None

    titles = {RATE: "samples/s", PEAK: "peak", STATE: "state", "collective_bytes": "traffic"}
    text = partial(_name, numeric=False)
    return table_of(
        f"Recommendations of {against.study.name}, beside ratios to {reference}",
        against.study.advice,
        [
            (text("strategy", "config"), lambda advice: ", ".join(advice.strategies)),
            (text("best_for", "best for"), attrgetter("best_for")),
            (text("when"), attrgetter("when")),
            *(
                (Column(f"{metric}_ratio", title), partial(ratios, metric))
                for metric, title in titles.items()
            ),
            (Column("changed_lines", "lines"), partial(effort, attrgetter("changed_lines"))),
            (
                Column("packages", numeric=False),
                partial(effort, lambda effort: listed(effort.packages)),
            ),
        ],
        [
            f"Ratios to `{reference}` under equal conditions: least, greatest (number of cells).",
            "Lines that a short training loop changes, and packages: `--view effort`.",
        ],
    )


def _at(values: Sequence[Any], index: int) -> Any:
    return values[index] if index < len(values) else None
