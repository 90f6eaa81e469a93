"""Trials, epochs, steps and samples of runs as pandas frames, CSV files and series."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal

from pydantic_core import from_json

from shardmark.base.cells import cell_id
from shardmark.base.errors import InputError
from shardmark.base.files.run_files import SAMPLES_FILE, STEPS_FILE
from shardmark.base.metrics import METRICS, TRIAL_METRICS
from shardmark.base.results.files import changed_files, open_regular, write_files
from shardmark.base.results.schema import Outcome, TrialResult
from shardmark.base.results.store import RunFolder, StoredRun
from shardmark.base.system.extras import require
from shardmark.base.table.formats import csv_cell
from shardmark.base.text import counted
from shardmark.bench.analysis.compare.epochs import epoch_values
from shardmark.bench.analysis.compare.regression import flattened
from shardmark.bench.analysis.compare.rows import gathered, other_varied, plain
from shardmark.bench.analysis.trial.rank_metrics import workers_of
from shardmark.bench.analysis.trial.raw_files import mapping, number, objects

if TYPE_CHECKING:
    import pandas as pd

MOST_STEPS_BYTES = 2**30
"""Largest `steps.jsonl` or `samples.jsonl` that is read."""
MOST_LINE_BYTES = 2**22
MAX_STEPS = 2**53
Record = dict[str, Any]
By = Literal["trial", "epoch", "step", "sample"]
TABLES: Mapping[By, str] = {
    "trial": "trials",
    "epoch": "epochs",
    "step": "steps",
    "sample": "samples",
}
"""Meaning of a row -> name of the table."""

IDENTITY = ("experiment", "run", "id", "strategy", "strategy_options", "world_size", "precision",
            "repeat")  # fmt: skip
TRIALS = ("synthetic", "outcome", "failure", "equivalent", "started_at_seconds", *TRIAL_METRICS)
DTYPES = {"failure": "string", "equivalent": "boolean"}
"""Types of columns that are often empty; other columns have the type of their values."""
_UNITS = ("seconds", "bytes", "percent", "watts", "joules", "celsius")


@dataclass(frozen=True, slots=True)
class Source:
    """A run to be exported."""

    run: StoredRun
    label: str
    """Name of the run's folder, with parent folders if two runs share the name."""

    def folder(self, trial_id: str) -> Path:
        return RunFolder(self.run.path).trial_folder(trial_id)

    def equivalent(self, trial: TrialResult) -> bool | None:
        """Return True if the trial trains the same as the reference; None if not verified."""
        verification = self.run.verification
        verdict = None if verification is None else verification.verdict_of(cell_id(trial.trial))
        return None if verdict is None else verdict.equivalent


def sources_of(runs: Sequence[StoredRun]) -> list[Source]:
    """Give each run a unique label.  Raises `InputError` for a run without a result."""
    for run in runs:
        if not run.trials:
            raise InputError(
                str(run.path),
                "no trial has a result that can be read",
                "finish the run: `shardmark run` with the same --out",
            )
    parts = [run.path.expanduser().resolve().parts for run in runs]
    count = 1
    while len({part[-count:] for part in parts}) < len({*parts}):
        count += 1
    labels = ("/".join(part[-count:]).lstrip("/") for part in parts)
    return list(map(Source, runs, labels))


# Frames


def frame_of(sources: Sequence[Source], by: By) -> pd.DataFrame:
    """Return the runs' trials, or the epochs, steps or samples of those that ended ok.

    The rows are in the order of the runs.  The columns are the trial's identity, the settings that
    vary, and the table's own columns.  Values are in base units; `attrs["units"]` maps each column
    that has a unit to it.

    Raises `InputError` for another `by`, or a raw file that is damaged.
    """
    require("pandas", needed_for="a data frame or CSV file")
    import pandas as pd

    if by not in TABLES:
        raise InputError("by", f"found {by!r}", f"allowed: {', '.join(TABLES)}")
    rows_of: Mapping[By, Callable[[Source, TrialResult], Iterable[Record]]] = {
        "trial": _trial_rows,
        "epoch": lambda _, trial: epoch_rows(trial),
        "step": step_rows,
        "sample": sample_rows,
    }
    pairs = [(source, trial) for source in sources for trial in source.run.trials]
    listed = [(*pair, row) for pair in pairs for row in rows_of[by](*pair)]
    columns = dict.fromkeys(name for *_, row in listed for name in row)
    if by == "trial":
        columns = dict.fromkeys((*TRIALS, *(name for _, trial in pairs for name in trial.metrics)))
    axes = {
        key: f"varied.{key}" if key in (*IDENTITY, *columns) else key
        for _, trial in pairs
        for key in other_varied(trial)
    }
    records = [
        _identity(source, trial)
        | {axes[key]: value for key, value in other_varied(trial).items()}
        | row
        for source, trial, row in listed
    ]
    frame = pd.DataFrame(
        {
            name: _series(name, [record.get(name) for record in records], by)
            for name in (*IDENTITY, *axes.values(), *columns)
        }
    )
    frame.attrs["units"] = {name: unit for name in map(str, frame) if (unit := unit_of(name))}
    return frame


def _series(name: str, values: Sequence[Any], by: By) -> pd.Series:
    """Return a typed series; missing values are pandas' NA, mixed types become text."""
    import pandas as pd

    kinds = {"integer": "Int64", "boolean": "boolean", "floating": "float64",
             "mixed-integer-float": "float64", "empty": "float64"}  # fmt: skip
    dtype = DTYPES.get(name) or kinds.get(pd.api.types.infer_dtype(values, skipna=True), "string")
    if name in METRICS and by in ("trial", "epoch"):
        dtype = "float64"
    if dtype == "string":
        values = [None if value is None else plain(value) for value in values]
    try:
        return pd.Series(values, dtype=dtype)
    except (TypeError, ValueError, OverflowError):
        reason = f"values that are no {dtype}"
        raise InputError(f"column {name}", reason, "repeat the trial that holds them") from None


def unit_of(name: str) -> str:
    """Return the unit of a column; empty if it has none."""
    if name.endswith("at_seconds"):
        return "seconds since 1970, UTC"
    if name in METRICS:
        return METRICS[name].unit
    return next((unit for unit in _UNITS if f"_{unit}" in f"_{name}"), "")


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


def _trial_rows(source: Source, trial: TrialResult) -> list[Record]:
    return [
        {
            "synthetic": trial.synthetic,
            "outcome": str(trial.outcome),
            "failure": None if trial.failure is None else trial.failure.reason,
            "equivalent": source.equivalent(trial),
            "started_at_seconds": trial.started_at_seconds,
            **values_of(trial),
        }
    ]


def values_of(trial: TrialResult) -> dict[str, float]:
    """Return metric -> value without missing ones; empty if the trial did not end ok."""
    if trial.outcome is not Outcome.OK:
        return {}
    return {name: summary.value for name, summary in trial.metrics.items() if summary is not None}


def epoch_rows(trial: TrialResult) -> list[Record]:
    """Return a row for each epoch, counted from 1; none if the recipe counts steps.

    `ended_at_seconds` is the Unix time at which the slowest rank had trained it.
    """
    workers = workers_of(trial)
    if trial.outcome is not Outcome.OK or not workers or _counts_steps(trial):
        return []
    rows = []
    for record in workers[0].epochs:
        ends = [
            window.started_at_seconds + window.window_seconds
            for rank in workers
            for window in rank.windows
            if window.end_step == record.end_step
        ]
        values = epoch_values(trial, record.epoch)
        rows.append(
            {
                "epoch": record.epoch + 1,
                "end_step": record.end_step,
                "ended_at_seconds": max(ends, default=None),
                **{
                    name: None if isinstance(value, str) or not math.isfinite(value) else value
                    for name, value in values.items()
                },
            }
        )
    return rows


def step_rows(source: Source, trial: TrialResult) -> list[Record]:
    """Return a row for each rank and step of `steps.jsonl`; epochs are counted from 1."""
    rows = [dict(line) for line in _lines(source, trial, STEPS_FILE)]
    for row in rows:
        epoch = row.get("epoch")
        if _counts_steps(trial):
            row["epoch"] = None
        elif isinstance(epoch, int):
            row["epoch"] = epoch + 1
    return rows


def sample_rows(source: Source, trial: TrialResult) -> list[Record]:
    """Return a row for each sampling and subject: rank, interface, GPU or machine."""
    rows: list[Record] = []
    for line in _lines(source, trial, SAMPLES_FILE):
        at = {"at_seconds": line.get("at_seconds")}
        for rank in objects(line, "ranks"):
            # Older runs stored each rank's bytes by interface as `network`.
            process = {key: value for key, value in rank.items() if key != "network"}
            rows.append({**at, "subject": "rank", **process})
        for name, counters in mapping(line.get("network")).items():
            rows.append({**at, "subject": "interface", "interface": name, **mapping(counters)})
        for gpu in objects(line, "gpus"):
            fields = {key: value for key, value in gpu.items() if key != "uuid"}
            rows.append({**at, "subject": "gpu", "gpu_uuid": gpu.get("uuid"), **fields})
        if machine := mapping(line.get("machine")):  # some kernels do not report it
            rows.append({**at, "subject": "machine", **machine})
    return rows


def _lines(source: Source, trial: TrialResult, name: str) -> Iterator[Mapping[str, Any]]:
    """Yield the lines of the file; none if the trial did not end ok or has no such file."""
    path = source.folder(trial.id) / name
    if trial.outcome is not Outcome.OK or not path.exists():
        return
    try:
        file = open_regular(path)
    except OSError as error:
        raise _damaged(path, error.strerror or str(error)) from None
    with file:
        if os.fstat(file.fileno()).st_size > MOST_STEPS_BYTES:
            raise _damaged(path, f"it is larger than {MOST_STEPS_BYTES // 2**20} MiB")
        lines = iter(partial(file.readline, MOST_LINE_BYTES), b"")
        for place, line in enumerate(lines, 1):
            try:
                content = from_json(line)
            except ValueError as error:
                raise _damaged(path, f"line {place} is no JSON: {error}") from None
            if not isinstance(content, dict):
                raise _damaged(path, f"line {place} is no object")
            if name == STEPS_FILE and (field := _invalid_field(content)) is not None:
                actual = json.dumps(content[field])[:40] if field in content else "missing"
                raise _damaged(path, f"line {place}: {field} is {actual}")
            yield content


def _invalid_field(step: Mapping[str, Any]) -> str | None:
    """Return the first field of a line of `steps.jsonl` that has no valid value, or None."""
    index = step.get("step")
    if type(index) is not int or not 0 <= index < MAX_STEPS:
        return "step"
    for name in ("started_at_seconds", *_MEANS, *_SPANS):
        value = number(step.get(name))
        if step.get(name) is not None and (value is None or not math.isfinite(value)):
            return name
    return None


def _damaged(path: Path, reason: str) -> InputError:
    remedy = f"remove {path.parent} and run the experiment again with the same --out"
    return InputError(str(path), reason, remedy)


def _counts_steps(trial: TrialResult) -> bool:
    return trial.trial.get("recipe", {}).get("steps") is not None


# Settings and series for trackers

_MEANS = {"loss": "train_loss", "learning_rate": "learning_rate"}
"""Field of `steps.jsonl` -> series, whose value is the mean over the ranks."""
_SPANS = [f"{part}_seconds" for part in ("step", "data", "forward", "backward", "optimizer")]
"""Fields of `steps.jsonl` of which a series has the slowest rank's value."""


def settings_of(source: Source, trial: TrialResult) -> Record:
    """Return a trial's settings and outcome by dotted key, without the keys that are not set."""
    content = {
        "run": source.label,
        "trial": trial.id,
        "files": str(source.folder(trial.id).absolute()),
        "started_at_seconds": trial.started_at_seconds,
        "outcome": str(trial.outcome),
        "failure": None if trial.failure is None else trial.failure.reason,
        "remedy": None if trial.failure is None else trial.failure.remedy,
        "synthetic": trial.synthetic,
        "equivalent": source.equivalent(trial),
        **{key: trial.trial.get(key) for key in ("workload", "recipe", "slow_ranks")},
        **trial.varied,
        "strategy": {"": trial.strategy, **trial.strategy_options},
        "world_size": trial.world_size,
        "recipe.precision": trial.precision,
        "repeat": trial.repeat,
    }
    pairs = flattened(content)
    return {key.removesuffix("."): value for key, value in pairs if value is not None}


def series_of(source: Source, trial: TrialResult) -> Iterator[tuple[int, dict[str, float]]]:
    """Yield a trial's values by series for each optimizer step, in order.

    `_timestamp` is their Unix time.  An epoch's values stand at its last step, and the final
    metrics at the step after the last one.
    """
    start = trial.started_at_seconds
    series: dict[int, dict[str, float]] = {}
    for step, rows in gathered((row["step"], row) for row in step_rows(source, trial)).items():
        series[step] = {f"step/{to}": fmean(_numbers(rows, name)) for name, to in _MEANS.items()}
        if all(row.get("measured") for row in rows):
            series[step] |= {f"step/{name}": max(_numbers(rows, name)) for name in _SPANS}
        series[step]["_timestamp"] = max(
            (row.get("started_at_seconds") or start) + (row.get("step_seconds") or 0)
            for row in rows
        )
    for row in epoch_rows(trial):
        step, end = row.pop("end_step") - 1, row.pop("ended_at_seconds") or start
        values = {f"epoch/{name}": value for name, value in row.items() if value is not None}
        series[step] = {"_timestamp": end} | series.get(step, {}) | values
    end = start + trial.total_seconds
    series[max(series, default=-1) + 1] = values_of(trial) | {"_timestamp": end}
    for step, values in sorted(series.items()):
        yield step, {name: value for name, value in values.items() if math.isfinite(value)}


def _numbers(rows: Sequence[Record], name: str) -> list[float]:
    """Return every rank's value, or NaN alone if a rank has none."""
    numbers = [value for row in rows if (value := row.get(name)) is not None]
    return numbers if len(numbers) == len(rows) else [math.nan]


# Files


def export_csv(sources: Sequence[Source], out: str | None) -> list[str]:
    """Write every table of the runs in base units; what is missing is an empty cell.

    `out` is a folder for all tables, or a file that ends in .csv for the trials alone.  Files of
    the same names are replaced, which the returned lines report.
    """
    place = Path(out or "exports/csv").expanduser()
    single = place.suffix.lower() == ".csv"
    if (single and place.is_dir()) or (not single and place.is_file()):
        actual = "folder" if single else "file"
        raise InputError(str(place), f"is a {actual}", "name a folder, or a file that ends in .csv")
    encoded = {
        place if single else place / f"{name}.csv": _csv(frame_of(sources, by))
        for by, name in TABLES.items()
        if by == "trial" or not single
    }
    replaced = changed_files(encoded)
    write_files(encoded)
    names = ", ".join(path.name for path in replaced)
    return [
        f"csv: {counted(sum(len(source.run.trials) for source in sources), 'trial')} to {place}",
        *([f"replaced files with other content: {names}"] if names else []),
        f'look: pandas.read_csv("{next(iter(encoded))}")',
    ]


def _csv(frame: pd.DataFrame) -> bytes:
    cells = frame.astype(object).where(frame.notna(), None).map(csv_cell)
    header = [csv_cell(str(name)) for name in cells]
    return bytes(cells.to_csv(index=False, lineterminator="\n", header=header).encode())
