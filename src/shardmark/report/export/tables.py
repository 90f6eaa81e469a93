"""Trials, epochs, steps and samples as pandas frames of typed columns."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic_core import from_json

from shardmark.analysis.compare.epochs import epoch_values
from shardmark.analysis.compare.rows import other_varied, plain
from shardmark.analysis.trial.rank_metrics import workers_of
from shardmark.analysis.trial.raw_files import mapping, objects
from shardmark.core.errors import InputError
from shardmark.core.metrics import METRICS, TRIAL_METRICS
from shardmark.core.run_files import SAMPLES_FILE, STEPS_FILE
from shardmark.report.export.source import Source
from shardmark.results.files import open_regular
from shardmark.results.schema import Outcome, TrialResult

if TYPE_CHECKING:
    import pandas as pd

MOST_STEPS_BYTES = 2**30
"""Of `steps.jsonl` or `samples.jsonl`."""
MOST_LINE_BYTES = 2**22
Record = dict[str, Any]
By = Literal["trial", "epoch", "step", "sample"]
TABLES: Mapping[By, str] = {
    "trial": "trials",
    "epoch": "epochs",
    "step": "steps",
    "sample": "samples",
}
"""What a row is -> the table's name."""

# fmt: off
IDENTITY = ("experiment", "run", "id", "strategy", "strategy_options", "world_size", "precision",
            "repeat")
TRIALS = ("synthetic", "outcome", "failure", "equivalent", "started_at_seconds")
EPOCHS = ("epoch", "end_step", "ended_at_seconds", "epoch_seconds", "elapsed_seconds",
          "train_loss", "evaluation_seconds")
STEPS = ("rank", "step", "epoch", "measured", "samples", "loss", "learning_rate",
         "started_at_seconds", "step_seconds", "data_seconds", "forward_seconds",
         "backward_seconds", "optimizer_seconds")
SAMPLES = ("at_seconds", "subject", "rank", "pid", "cpu_seconds", "rss_bytes", "threads",
           "processes", "open_files", "context_switches", "interface", "bytes_sent",
           "bytes_received", "gpu_uuid", "utilization_percent", "power_watts", "energy_joules",
           "temperature_celsius", "memory_used_bytes", "clock_limits", "other_processes",
           "nvlink_sent_bytes", "nvlink_received_bytes", "cores",
           "cpu_pressure_seconds", "memory_pressure_seconds", "throttled_seconds")
TEXTS = ("experiment", "run", "id", "strategy", "strategy_options", "precision",
         "outcome", "failure", "subject", "interface", "gpu_uuid")
TRUTHS = ("synthetic", "equivalent", "measured")
INTEGERS = ("world_size", "repeat", "epoch", "end_step", "rank", "step", "samples", "pid",
            "rss_bytes", "threads", "processes", "open_files", "context_switches", "bytes_sent",
            "bytes_received", "memory_used_bytes", "clock_limits", "other_processes",
            "nvlink_sent_bytes", "nvlink_received_bytes", "cores")
# fmt: on
DTYPES = {
    **dict.fromkeys(TEXTS, "string"),
    **dict.fromkeys(TRUTHS, "boolean"),
    **dict.fromkeys(INTEGERS, "Int64"),
}
"""All others are float64.  These take pandas' NA, so that whole numbers stay whole."""
_UNITS = ("seconds", "bytes", "percent", "watts", "joules", "celsius")


def frame_of(sources: Sequence[Source], by: By) -> pd.DataFrame:
    """The runs' trials, or the epochs, steps or samples of those that ended ok, in run order.

    Identity first, then what varies, then the table's own columns; base units, which
    `attrs["units"]` has by column.

    Raises `InputError` for another `by`, or a raw file that is damaged.
    """
    rows_of: Mapping[By, Callable[[Source, TrialResult], Iterable[Record]]] = {
        "trial": lambda source, trial: [_trial_row(source, trial)],
        "epoch": lambda _, trial: epoch_rows(trial),
        "step": step_rows,
        "sample": sample_rows,
    }
    if by not in TABLES:
        raise InputError("by", f"found {by!r}", f"allowed: {', '.join(TABLES)}")
    listed = [
        (source, trial, row)
        for source in sources
        for trial in source.trials
        for row in rows_of[by](source, trial)
    ]
    trials = [trial for source in sources for trial in source.trials]
    more = [name for _, _, row in listed for name in row] if by == "epoch" else []
    if by == "trial":
        more = [*TRIAL_METRICS, *(name for trial in trials for name in trial.metrics)]
    own = {"trial": TRIALS, "epoch": EPOCHS, "step": STEPS, "sample": SAMPLES}[by]
    names = tuple(dict.fromkeys((*own, *more)))
    axes = {
        key: f"varied.{key}" if key in (*IDENTITY, *own) else key
        for trial in trials
        for key in other_varied(trial)
    }
    records = [
        _identity(source, trial)
        | {axes[key]: value for key, value in other_varied(trial).items()}
        | row
        for source, trial, row in listed
    ]
    # A metric is a number, also where a sample's column of that name counts whole things.
    dtypes = {name: DTYPES[name] for name in (*IDENTITY, *own) if name in DTYPES}
    return _frame(records, (*IDENTITY, *axes.values(), *names), dtypes, {*axes.values()})


def _frame(
    records: Sequence[Record], names: Sequence[str], dtypes: Mapping[str, str], axes: set[str]
) -> pd.DataFrame:
    import pandas as pd

    columns = {}
    for name in names:
        values = [record.get(name) for record in records]
        dtype = _axis_dtype(values) if name in axes else dtypes.get(name, "float64")
        if dtype == "string":
            values = [None if value is None else plain(value) for value in values]
        try:
            columns[name] = pd.Series(values, dtype=dtype)
        except (TypeError, ValueError, OverflowError):
            found = f"values that are no {dtype}"
            raise InputError(f"column {name}", found, "repeat the trial that holds them") from None
    frame = pd.DataFrame(columns)
    frame.attrs["units"] = {name: unit for name in names if (unit := unit_of(name))}
    return frame


def unit_of(name: str) -> str:
    """Empty where the column has none."""
    if name.endswith("at_seconds"):
        return "seconds since 1970, UTC"
    if name in METRICS:
        return METRICS[name].unit
    return next((unit for unit in _UNITS if f"_{unit}" in f"_{name}"), "")


def _axis_dtype(values: Sequence[object]) -> str:
    """An axis of the experiment: its values' own type, or text where they have several."""
    import pandas as pd

    numbers = {"integer": "Int64", "floating": "float64", "mixed-integer-float": "float64"}
    kind = pd.api.types.infer_dtype(values, skipna=True)
    return "boolean" if kind == "boolean" else numbers.get(kind, "string")


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


def _trial_row(source: Source, trial: TrialResult) -> Record:
    return {
        "synthetic": trial.synthetic,
        "outcome": str(trial.outcome),
        "failure": None if trial.failure is None else trial.failure.reason,
        "equivalent": source.equivalent(trial),
        "started_at_seconds": trial.started_at_seconds,
        **values_of(trial),
    }


def values_of(trial: TrialResult) -> dict[str, float]:
    """Metric -> value, without the missing; none of a trial that did not end ok."""
    if trial.outcome is not Outcome.OK:
        return {}
    return {name: summary.value for name, summary in trial.metrics.items() if summary is not None}


def epoch_rows(trial: TrialResult) -> list[Record]:
    """One an epoch, counted from 1 as `compare --epochs` does; none where the recipe counts steps.

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
                **{n: None if isinstance(v, str) else finite(v) for n, v in values.items()},
            }
        )
    return rows


def step_rows(source: Source, trial: TrialResult) -> list[Record]:
    """One a rank and step, as `steps.jsonl` has them; epochs are counted from 1."""
    counts_steps = _counts_steps(trial)
    return [
        {**line, "epoch": None if counts_steps else _counted_from_1(line.get("epoch"))}
        for line in _lines(source, trial, STEPS_FILE)
    ]


def sample_rows(source: Source, trial: TrialResult) -> list[Record]:
    """One a sampling and subject: rank, rank's interface, interface, GPU, or the machine."""
    rows: list[Record] = []
    for line in _lines(source, trial, SAMPLES_FILE):
        at = {"at_seconds": line.get("at_seconds")}
        for rank in objects(line, "ranks"):
            own = {key: value for key, value in rank.items() if key != "network"}
            rows.append({**at, "subject": "rank", **own})
            process = {"rank": rank.get("rank"), "pid": rank.get("pid")}
            rows += _interfaces("rank's interface", {**at, **process}, rank.get("network"))
        rows += _interfaces("interface", at, line.get("network"))
        for gpu in objects(line, "gpus"):
            own = {key: value for key, value in gpu.items() if key != "uuid"}
            rows.append({**at, "subject": "gpu", "gpu_uuid": gpu.get("uuid"), **own})
        if machine := mapping(line.get("machine")):  # some kernels do not tell
            rows.append({**at, "subject": "machine", **machine})
    return rows


def _interfaces(subject: str, whose: Record, network: object) -> Iterator[Record]:
    for name, counters in mapping(network).items():
        yield {**whose, "subject": subject, "interface": name, **mapping(counters)}


def _counted_from_1(epoch: object) -> object:
    return epoch + 1 if isinstance(epoch, int) else epoch


def finite(value: object) -> float | None:
    """The number; None for anything that is none, or not finite."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def _lines(source: Source, trial: TrialResult, name: str) -> Iterator[Mapping[str, Any]]:
    """Of a trial that ended ok and recorded the file."""
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
        for number, line in enumerate(lines, 1):
            try:
                content = from_json(line)
            except ValueError as error:
                raise _damaged(path, f"line {number} is no JSON: {error}") from None
            if not isinstance(content, dict):
                raise _damaged(path, f"line {number} is no object")
            yield content


def _damaged(path: Path, reason: str) -> InputError:
    remedy = "run the experiment again with the same --out, which repeats the trial"
    return InputError(str(path), reason, remedy)


def _counts_steps(trial: TrialResult) -> bool:
    return trial.trial.get("recipe", {}).get("steps") is not None
