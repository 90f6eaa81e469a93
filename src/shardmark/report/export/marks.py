"""A trial's raw files and epochs as plain rows, for tables and trackers alike."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from shardmark.analysis.compare.epochs import elapsed_seconds, training_seconds
from shardmark.analysis.trial.over_ranks import train_loss
from shardmark.core.errors import InputError
from shardmark.core.run_files import SAMPLES_FILE, STEPS_FILE
from shardmark.report.export._protocol import Source
from shardmark.results.schema import Outcome, RankRecord, TrialResult

Record = dict[str, Any]


def epoch_rows(trial: TrialResult) -> list[Record]:
    """One an epoch, counted from 1 as `compare --epochs` does; none where the recipe counts steps.

    `ended_at_seconds` is the Unix time at which the slowest rank had trained it.
    """
    workers = _workers(trial)
    if trial.outcome is not Outcome.OK or not workers or _counts_steps(trial):
        return []
    rows = []
    for record in workers[0].epochs:
        values = {
            "epoch_seconds": training_seconds(trial, record.epoch),
            "elapsed_seconds": elapsed_seconds(trial, record.epoch),
            "train_loss": train_loss(workers, record.epoch),
            "evaluation_seconds": record.evaluation_seconds,
            **(record.quality or {}),
        }
        numbers = {name: value for name, value in values.items() if not isinstance(value, str)}
        rows.append(
            {
                "epoch": record.epoch + 1,
                "end_step": record.end_step,
                "ended_at_seconds": _window_ends(workers, record.end_step),
                **{name: finite(value) for name, value in numbers.items()},
            }
        )
    return rows


def step_rows(source: Source, trial: TrialResult) -> list[Record]:
    """One a rank and step, as `steps.jsonl` has them; epochs are counted from 1."""
    counts_steps = _counts_steps(trial)
    rows = []
    for line in _lines(source, trial, STEPS_FILE):
        epoch = line.get("epoch")
        rows.append(
            {**line, "epoch": None if epoch is None or counts_steps else epoch + 1},
        )
    return rows


def sample_rows(source: Source, trial: TrialResult) -> list[Record]:
    """One a sampling and rank, rank's interface, interface, GPU, or the machine.

    Each has its subject's columns.
    """
    rows: list[Record] = []
    for line in _lines(source, trial, SAMPLES_FILE):
        at = {"at_seconds": line.get("at_seconds")}
        for one in line.get("ranks", ()):
            own = {key: value for key, value in one.items() if key != "network"}
            rows.append({**at, "subject": "rank", **own})
            of_rank = {"rank": one.get("rank"), "pid": one.get("pid")}
            rows += [
                {**at, "subject": "rank's interface", **of_rank, "interface": name, **counters}
                for name, counters in (one.get("network") or {}).items()
            ]
        rows += [
            {**at, "subject": "interface", "interface": name, **counters}
            for name, counters in line.get("network", {}).items()
        ]
        for gpu in line.get("gpus", ()):
            rest = {key: value for key, value in gpu.items() if key != "uuid"}
            rows.append({**at, "subject": "gpu", "gpu_uuid": gpu.get("uuid"), **rest})
        machine = line.get("machine")
        if machine is not None:  # of an older version, or a kernel that does not tell
            rows.append({**at, "subject": "machine", **machine})
    return rows


def finite(value: object) -> float | None:
    """The number; None for anything that is none, or not finite."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def last_end_seconds(spans: Iterable[tuple[object, object]]) -> float | None:
    """Unix time at which the last of (start, length) is over; None where no start is known."""
    ends = [
        start + (finite(length) or 0.0)
        for started, length in spans
        if (start := finite(started)) is not None
    ]
    return max(ends, default=None)


def _lines(source: Source, trial: TrialResult, name: str) -> Iterator[Mapping[str, Any]]:
    """Of a trial that ended ok and recorded the file."""
    if trial.outcome is not Outcome.OK:
        return
    path = source.folder(trial) / name
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return
    except (OSError, UnicodeDecodeError) as error:
        raise _damaged(path, str(error)) from None
    for number, line in enumerate(text.splitlines(), 1):
        try:
            content = json.loads(line)
        except ValueError as error:
            raise _damaged(path, f"line {number} is no JSON: {error}") from None
        if not isinstance(content, dict):
            raise _damaged(path, f"line {number} is no object")
        yield content


def _damaged(path: Path, found: str) -> InputError:
    return InputError(
        str(path), found, "run the experiment again with the same --out, which repeats the trial"
    )


def _counts_steps(trial: TrialResult) -> bool:
    return trial.trial.get("recipe", {}).get("steps") is not None


def _workers(trial: TrialResult) -> list[RankRecord]:
    ordered = sorted(trial.ranks, key=lambda rank: rank.rank)
    return [rank for rank in ordered if rank.role == "worker" and rank.lost is None]


def _window_ends(workers: Sequence[RankRecord], end_step: int) -> float | None:
    return last_end_seconds(
        (window.started_at_seconds, window.window_seconds)
        for rank in workers
        for window in rank.windows
        if window.end_step == end_step
    )
