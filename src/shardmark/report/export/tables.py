"""Trials, epochs, steps and samples as typed columns: pandas, Parquet and CSV only lay them out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from shardmark.analysis.compare.rows import other_varied, plain
from shardmark.core.errors import InputError
from shardmark.core.metrics import METRICS, TRIAL_METRICS
from shardmark.report.export._protocol import Source, values_of
from shardmark.report.export.marks import Record, epoch_rows, sample_rows, step_rows
from shardmark.results.schema import TrialResult

Kind = Literal["text", "integer", "number", "boolean"]
By = Literal["trial", "epoch", "step", "sample"]
TABLES: Mapping[By, str] = {
    "trial": "trials",
    "epoch": "epochs",
    "step": "steps",
    "sample": "samples",
}
"""What a row is -> the table's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column in base units; None where a row has no value."""

    name: str
    kind: Kind
    unit: str = ""
    """Empty where it has none."""
    values: tuple[Any, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Columns of one length."""

    name: str
    columns: tuple[Column, ...]

    @property
    def rows(self) -> int:
        return len(self.columns[0].values)


@dataclass(frozen=True, slots=True)
class Field:
    """A column to be."""

    name: str
    kind: Kind
    unit: str = ""


IDENTITY = (
    Field("experiment", "text"),
    Field("run", "text"),
    Field("id", "text"),
    Field("strategy", "text"),
    Field("strategy_options", "text"),
    Field("world_size", "integer", "ranks"),
    Field("precision", "text"),
    Field("repeat", "integer"),
)
ENDING = (
    Field("synthetic", "boolean"),
    Field("outcome", "text"),
    Field("failure", "text"),
    Field("equivalent", "boolean"),
    Field("started_at_seconds", "number", "seconds since 1970, UTC"),
)
EPOCHS = (
    Field("epoch", "integer"),
    Field("end_step", "integer"),
    Field("ended_at_seconds", "number", "seconds since 1970, UTC"),
    Field("epoch_seconds", "number", "seconds"),
    Field("elapsed_seconds", "number", "seconds"),
    Field("train_loss", "number", "loss"),
    Field("evaluation_seconds", "number", "seconds"),
)
STEPS = (
    Field("rank", "integer"),
    Field("step", "integer"),
    Field("epoch", "integer"),
    Field("measured", "boolean"),
    Field("samples", "integer", "samples"),
    Field("loss", "number", "loss"),
    Field("learning_rate", "number"),
    Field("started_at_seconds", "number", "seconds since 1970, UTC"),
    Field("step_seconds", "number", "seconds"),
    Field("data_seconds", "number", "seconds"),
    Field("forward_seconds", "number", "seconds"),
    Field("backward_seconds", "number", "seconds"),
    Field("optimizer_seconds", "number", "seconds"),
)
SAMPLES = (
    Field("at_seconds", "number", "seconds since 1970, UTC"),
    Field("subject", "text"),
    Field("rank", "integer"),
    Field("pid", "integer"),
    Field("cpu_seconds", "number", "seconds"),
    Field("rss_bytes", "integer", "bytes"),
    Field("threads", "integer", "threads"),
    Field("processes", "integer", "processes"),
    Field("open_files", "integer", "files"),
    Field("context_switches", "integer", "switches"),
    Field("interface", "text"),
    Field("bytes_sent", "integer", "bytes"),
    Field("bytes_received", "integer", "bytes"),
    Field("gpu_uuid", "text"),
    Field("utilization_percent", "number", "percent"),
    Field("power_watts", "number", "watts"),
    Field("energy_joules", "number", "joules"),
    Field("temperature_celsius", "number", "celsius"),
    Field("memory_used_bytes", "integer", "bytes"),
    Field("clock_limits", "integer", "bits"),
    Field("cores", "integer", "cores"),
)


def table_of(sources: Sequence[Source], by: By) -> Table:
    """The runs' trials, or the epochs, steps or samples of those that ended ok, in run order.

    Raises `InputError` for another `by`, or a raw file that is damaged.
    """
    if by == "trial":
        return _table("trials", sources, ENDING, _trial_row, _metric_fields(sources))
    if by == "epoch":
        quality = _quality_fields(sources)
        return _table("epochs", sources, EPOCHS, lambda _, trial: epoch_rows(trial), quality)
    if by == "step":
        return _table("steps", sources, STEPS, step_rows)
    if by == "sample":
        return _table("samples", sources, SAMPLES, sample_rows)
    raise InputError("by", f"found {by!r}", f"allowed: {', '.join(TABLES)}")


def _table(
    name: str,
    sources: Sequence[Source],
    fields: Sequence[Field],
    rows_of: Callable[[Source, TrialResult], Iterable[Record]],
    more: Sequence[Field] = (),
) -> Table:
    """Identity first, then what varies, then the table's own columns."""
    keys = dict.fromkeys(
        key for one in sources for trial in one.trials for key in other_varied(trial)
    )
    fixed = {field.name for field in (*IDENTITY, *fields)}
    varied = {key: key if key not in fixed else f"varied.{key}" for key in keys}
    rows = [
        _identity(source, trial)
        | {varied[key]: value for key, value in other_varied(trial).items()}
        | row
        for source in sources
        for trial in source.trials
        for row in rows_of(source, trial)
    ]
    columns = [_column(field, rows) for field in IDENTITY]
    columns += [_guessed(name, rows) for name in varied.values()]
    columns += [_column(field, rows) for field in (*fields, *more)]
    return Table(name=name, columns=tuple(columns))


def _identity(source: Source, trial: TrialResult) -> Record:
    return {
        "experiment": source.run.name,
        "run": source.label,
        "id": trial.id,
        "strategy": trial.strategy,
        "strategy_options": plain(trial.strategy_options),
        "world_size": trial.world_size,
        "precision": trial.precision,
        "repeat": trial.repeat,
    }


def _trial_row(source: Source, trial: TrialResult) -> list[Record]:
    failure = trial.failure
    row = {
        "synthetic": trial.synthetic,
        "outcome": str(trial.outcome),
        "failure": None if failure is None else failure.reason,
        "equivalent": source.equivalent(trial),
        "started_at_seconds": trial.started_at_seconds,
        **values_of(trial),
    }
    return [row]


def _metric_fields(sources: Sequence[Source]) -> list[Field]:
    recorded = (name for one in sources for trial in one.trials for name in trial.metrics)
    return [_metric_field(name) for name in dict.fromkeys((*TRIAL_METRICS, *recorded))]


def _quality_fields(sources: Sequence[Source]) -> list[Field]:
    """What was evaluated after an epoch."""
    known = {field.name for field in EPOCHS}
    rows = (row for one in sources for trial in one.trials for row in epoch_rows(trial))
    return [
        _metric_field(name)
        for name in dict.fromkeys(n for row in rows for n in row)
        if name not in known
    ]


def _metric_field(name: str) -> Field:
    return Field(name, "number", METRICS[name].unit if name in METRICS else "")


def _column(field: Field, rows: Sequence[Record]) -> Column:
    values = tuple(_typed(row.get(field.name), field.kind) for row in rows)
    return Column(name=field.name, kind=field.kind, unit=field.unit, values=values)


def _guessed(name: str, rows: Sequence[Record]) -> Column:
    """An axis of the experiment: its values' own type, or text where they have several."""
    found = {type(value) for row in rows if (value := row.get(name)) is not None}
    kind: Kind = "text"
    if found == {bool}:
        kind = "boolean"
    elif found == {int}:
        kind = "integer"
    elif found and found <= {int, float}:
        kind = "number"
    return _column(Field(name, kind), rows)


def _typed(value: Any, kind: Kind) -> Any:
    if value is None:
        return None
    if kind == "text":
        return plain(value)
    return float(value) if kind == "number" else bool(value) if kind == "boolean" else int(value)
