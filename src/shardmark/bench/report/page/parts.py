"""Parts of the page beside figures and comparison: machine, failures, verdicts, trials, ranks."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any

from shardmark.base.cells import ranks_and_nodes, title_of
from shardmark.base.errors import ShardmarkError
from shardmark.base.evidence.checks import Check
from shardmark.base.files.run_files import LOG_FILE
from shardmark.base.files.strict_yaml import MAX_CHARACTERS
from shardmark.base.metrics import METRICS
from shardmark.base.results.files import open_regular, read_regular
from shardmark.base.results.schema import RankRecord, TrialResult
from shardmark.base.results.store import EXPERIMENT_FILE, RunFolder, StoredRun
from shardmark.base.results.verification import Verdict, deviation_text
from shardmark.base.table.table import (
    BYTES,
    Column,
    Columns,
    Table,
    for_items,
    metric_column,
    table_of,
)
from shardmark.base.text import one_line, with_options
from shardmark.bench.analysis.compare.rows import Failed, Row, plain
from shardmark.bench.report.figures.measured import peak_bytes
from shardmark.bench.report.table.row_columns import row_columns

TAIL_LINES = 40
TAIL_BYTES = 64 * 1024
LINE_CHARACTERS = 400
TRIAL_METRICS = ("samples_per_second", "tokens_per_second", "step_seconds", "peak_memory_bytes",
                 "validation_loss", "accuracy_top1", "map", "bits_per_byte",
                 "cpu_percent")  # fmt: skip


# Machine and experiment


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Machine and experiment of a run."""

    run: str
    date: str
    host: str
    environment: str
    """The machine's environment as indented JSON; empty if none was recorded."""
    experiment_yaml: str
    """The experiment file, or the reason for which it cannot be read."""


def facts_of(run: StoredRun) -> Facts:
    """Read `environment.json` and `experiment.yaml`."""
    try:
        text = read_regular(run.path / EXPERIMENT_FILE, MAX_CHARACTERS).decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        text = f"{EXPERIMENT_FILE} cannot be read: {reason}"
    environment = RunFolder(run.path).read_environment()
    return Facts(
        run=run.name,
        date=str(environment.get("date") or "")[:10],
        host=str(environment.get("host") or ""),
        environment=_environment_text(environment),
        experiment_yaml=text,
    )


def _environment_text(environment: dict[str, Any]) -> str:
    """Return the environment without paths of the machine and without the list of cores."""
    shown = {key: value for key, value in environment.items() if key != "python_executable"}
    if isinstance(cpu := environment.get("cpu"), dict):
        shown["cpu"] = {key: value for key, value in cpu.items() if key != "affinity"}
    try:
        return json.dumps(shown, indent=2, ensure_ascii=False) if shown else ""
    except RecursionError:
        return "environment.json is nested too deeply"


def planned_trials(run: StoredRun) -> int | None:
    """Return the least number of trials of the experiment; None if it is not known here."""
    from shardmark.experiment.load import from_mapping
    from shardmark.experiment.matrix import expand

    device_types = {trial.trial.get("device_type") for trial in run.trials}
    try:
        experiment = from_mapping(RunFolder(run.path).read_experiment())
        plan = expand(experiment, "cuda" if "cuda" in device_types else "cpu")
    except ShardmarkError:
        return None  # an experiment of another version, or a damaged file
    return sum(trial.repeat < trial.measure.repeats.at_least for trial in plan.trials)


def progress_notes(runs: Sequence[StoredRun]) -> list[str]:
    """Return a note for each run with trials that have no result yet."""
    notes = []
    for run in runs:
        planned = planned_trials(run)
        begun = f"; begun without a result: {len(run.missing)}" if run.missing else ""
        if planned is not None and len(run.trials) < planned:
            text = f"{len(run.trials)} of {planned} planned trials have a result{begun}."
        elif run.missing:
            text = f"The run is not complete{begun}."
        else:
            continue
        name = f"{run.name}: " if len(runs) > 1 else ""
        notes.append(f"{name}{text} `shardmark run` with `--out` and this folder finishes the run.")
    return notes


# Trials that did not end ok, with reason, remedy, and the last lines of their logs


@dataclass(frozen=True, slots=True, kw_only=True)
class LogTail:
    trial: str
    text: str
    cut: bool
    """True if the file has more lines before."""


def failed_trials(rows: Sequence[Row]) -> list[tuple[str, Failed, list[LogTail]]]:
    """Return each row's place and failed trials with their logs, as the comparison orders them."""
    return [
        (
            row.place,
            failed,
            [
                tail
                for trial in failed.trials
                if row.folder is not None
                and (tail := log_tail(RunFolder(row.folder).trial_folder(trial.id))) is not None
            ],
        )
        for row in rows
        for failed in row.failed
    ]


def log_tail(folder: Path) -> LogTail | None:
    """Return the last lines of a trial's log as plain text; None without a readable text."""
    try:
        with open_regular(folder / LOG_FILE) as file:
            size_bytes = file.seek(0, os.SEEK_END)
            file.seek(max(0, size_bytes - TAIL_BYTES))
            content = file.read()
    except OSError:
        return None
    lines = content.decode("utf-8", errors="replace").rstrip().split("\n")
    if size_bytes > TAIL_BYTES:
        lines = lines[1:]  # the first line may be incomplete
    if not any(lines):
        return None
    shown = [_shortened(line) for line in lines[-TAIL_LINES:]]
    cut = size_bytes > TAIL_BYTES or len(lines) > len(shown)
    return LogTail(trial=folder.name, text="\n".join(shown), cut=cut)


def _shortened(line: str) -> str:
    last_text = line.rstrip().rpartition("\r")[2]  # a progress bar overwrote the line
    text = one_line(last_text)
    return text if len(text) <= LINE_CHARACTERS else f"{text[:LINE_CHARACTERS]} ..."


# Tables


def verification_tables(runs: Sequence[StoredRun]) -> list[tuple[StoredRun, Table, list[Table]]]:
    """Return each verified run with its verdicts, few ranks before many, and their checks."""
    tables = []
    for run in runs:
        if run.verification is not None:
            verdicts = sorted(
                run.verification.verdicts,
                key=lambda v: (
                    plain(v.varied),
                    v.strategy,
                    plain(v.strategy_options),
                    v.world_size,
                ),
            )
            checks = [
                table_of(f"Checks of {_place(verdict)}", verdict.checks, _CHECK)
                for verdict in verdicts
                if verdict.checks
            ]
            tables.append((run, table_of("Verdicts on equivalence", verdicts, _VERDICT), checks))
    return tables


def trials_table(rows: Sequence[Row]) -> Table:
    """Return a table with a line for each trial, in the order of the comparison."""
    listed = [(row, trial) for row in rows for trial in row.trials]
    columns = [*_names(rows), *for_items(_TRIAL, itemgetter(1))]
    return table_of(f"All {len(listed)} trials", listed, columns)


def ranks_table(rows: Sequence[Row]) -> Table:
    """Return a table with a line for each rank's record, with the rank's own memory peak."""
    listed = [
        (row, trial.repeat, rank) for row in rows for trial in row.trials for rank in trial.ranks
    ]
    repeat: Columns[Any] = [(Column("repeat"), itemgetter(1))]
    columns = [*_names(rows), *repeat, *for_items(_RANK, itemgetter(2))]
    return table_of(f"All {len(listed)} ranks", listed, columns)


def definitions(rows: Sequence[Row]) -> Table:
    """Return the definitions of the metrics that have a value somewhere."""
    names = {name for row in rows for name, value in row.metrics.items() if value is not None}
    metrics = [metric for metric in METRICS.values() if metric.name in names]
    return table_of("Metrics with a value", metrics, _DEFINITION)


def _names(rows: Sequence[Row]) -> Columns[Any]:
    """Return the columns that name a row, for items whose first element is the row."""
    return for_items([pair for pair in row_columns(rows) if pair[0].names_row], itemgetter(0))


_text = partial(Column, numeric=False)


def _place(verdict: Verdict) -> str:
    label = with_options(verdict.strategy, verdict.strategy_options)
    varied = "".join(f", {title_of(key)}={plain(value)}" for key, value in verdict.varied.items())
    return f"{label} on {ranks_and_nodes(verdict.world_size, 1)}, {verdict.precision}{varied}"


def _word(verdict: Verdict) -> str:
    if verdict.equivalent is not None:
        return "equivalent" if verdict.equivalent else "not equivalent"
    return "not tried" if verdict.guarantee is None else f"differs by design: {verdict.guarantee}"


def _worst(verdict: Verdict) -> str | None:
    """Return the largest deviation relative to rounding; None if nothing was compared."""
    compared = verdict.checks and verdict.guarantee is None and verdict.worst is not None
    return deviation_text(verdict.worst) if compared else None


def _cause(verdict: Verdict) -> str:
    """Return the cause of a deviation or of a missing verdict; empty if the verdict says it."""
    cause = verdict.cause
    deviates = verdict.equivalent is False or not verdict.checks
    if cause is None or not deviates or cause.text == _word(verdict):
        return ""
    parts = {"": cause.text, "Evidence: ": cause.evidence, "Setting: ": cause.setting,
             "First deviation: ": cause.first_deviation}  # fmt: skip
    return " ".join(f"{title}{text}." for title, text in parts.items() if text)


def _rounded(value: float | str | None, digits: int = 6) -> str:
    return value if isinstance(value, str) else "" if value is None else f"{value:.{digits}g}"


def _value_of(name: str) -> Callable[[TrialResult], float | None]:
    return lambda trial: None if (summary := trial.metrics.get(name)) is None else summary.value


def _started(trial: TrialResult) -> str | None:
    try:
        return f"{datetime.fromtimestamp(trial.started_at_seconds, UTC):%Y-%m-%d %H:%M:%S}"
    except (ValueError, OverflowError, OSError):
        return None


def _per_second(rank: RankRecord, done: int | None) -> float | None:
    seconds = sum(window.window_seconds for window in rank.windows)
    return done / seconds if seconds and done else None


def _state_bytes(rank: RankRecord) -> float | None:
    probe = rank.probe
    if probe is None:
        return None
    parts = (probe.parameter_bytes, probe.gradient_bytes, probe.optimizer_state_bytes)
    return None if None in parts else sum(filter(None, parts))


_VERDICT: Columns[Verdict] = [
    (_text("strategy"), _place),
    (_text("verdict"), _word),
    (Column("worst"), _worst),
    (_text("by its own definition"), lambda verdict: "; ".join(verdict.mathematics)),
    (_text("cause"), _cause),
]
_CHECK: Columns[Check] = [
    (_text("check"), attrgetter("name")),
    (_text("result"), lambda check: "holds" if check.holds else "deviates"),
    (_text("found"), lambda check: _rounded(check.found)),
    (_text("expected"), lambda check: _rounded(check.expected)),
    (_text("tolerance"), lambda check: _rounded(check.tolerance, 3)),
    (_text("where"), lambda check: check.where or ""),
]
_TRIAL: Columns[TrialResult] = [
    (Column("repeat"), attrgetter("repeat")),
    (Column("order"), attrgetter("order")),
    (_text("outcome"), lambda trial: str(trial.outcome)),
    *((metric_column(name), _value_of(name)) for name in TRIAL_METRICS),
    (metric_column("total_seconds"), attrgetter("total_seconds")),
    (_text("started (UTC)"), _started),
    (_text("trial"), attrgetter("id")),
]
_RANK: Columns[RankRecord] = [
    (Column("rank"), attrgetter("rank")),
    *((_text(name), attrgetter(name)) for name in ("role", "host", "device")),
    *((Column(name), attrgetter(name)) for name in ("threads", "samples")),
    (Column("windows", unit="s"), lambda rank: sum(w.window_seconds for w in rank.windows) or None),
    (Column("samples/s"), lambda rank: _per_second(rank, rank.samples)),
    (Column("tokens/s"), lambda rank: _per_second(rank, rank.tokens)),
    (Column("peak", unit=BYTES), peak_bytes),
    (Column("state", unit=BYTES), _state_bytes),
    (_text("first weights"), lambda rank: (rank.initial_weights_sha256 or "")[:8]),
    (_text("last weights"), lambda rank: (rank.final_weights_sha256 or "")[:8]),
    (
        _text("ended early"),
        lambda rank: "" if rank.error is None else f"{rank.error.kind}: {rank.error.message}",
    ),
]
_DEFINITION: Columns[Any] = [
    (_text("metric"), attrgetter("name")),
    (_text("unit"), attrgetter("unit")),
    (_text("over ranks"), lambda metric: "" if metric.over == "trial" else metric.over),
    (
        _text("definition"),
        lambda metric: f"{metric.definition}{f' Source: {metric.source}.' * bool(metric.source)}",
    ),
]
