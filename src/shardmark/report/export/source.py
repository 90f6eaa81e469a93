"""What every target of `shardmark export` gets, gives back and may raise."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from shardmark.core.errors import InputError, ShardmarkError
from shardmark.results.schema import Outcome, TrialResult
from shardmark.results.store import RunFolder, StoredRun
from shardmark.trials.trial import cell_id


class MissingExtra(ShardmarkError):  # noqa: N818  (as `StrategyUnavailable`)
    """The target's library is not installed."""

    def __init__(self, target: str, library: str) -> None:
        super().__init__(target, library)

    def __str__(self) -> str:
        target, library = self.args
        install = f"pip install 'shardmark[{target}]'"
        return f"cannot export to {target}: {library} is not installed; {install}"


@dataclass(frozen=True, slots=True)
class Source:
    """One run to be exported."""

    run: StoredRun
    label: str
    """Its folder's name, with those above it where two runs share the name."""

    @property
    def trials(self) -> tuple[TrialResult, ...]:
        return self.run.trials

    def folder(self, trial_id: str) -> Path:
        """Where the trial's raw files lie."""
        return RunFolder(self.run.path).trial_folder(trial_id)

    def equivalent(self, trial: TrialResult) -> bool | None:
        """Whether the trial trains what the reference trains; None where that was not shown."""
        verification = self.run.verification
        verdict = None if verification is None else verification.of(cell_id(trial.trial))
        return None if verdict is None else verdict.equivalent


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What an export did."""

    where: str
    """Folder, file or tracking URI."""
    trials: int
    """Written, or written anew."""
    kept: int = 0
    """Trials that the target held already and that were left as they are."""
    look: str
    """How to look at it: a command, or a line of Python."""


class Target(Protocol):
    """Hands runs over.  `out` is a folder, a file or a tracking URI; None for the usual place.

    Raises `MissingExtra` without its library, and `InputError` where `out` holds something else.
    Exporting the same trial twice leaves one record of it.
    """

    def __call__(self, sources: Sequence[Source], out: str | None) -> Exported: ...


def sources_of(runs: Sequence[StoredRun]) -> list[Source]:
    """The runs with labels that differ.  Raises `InputError` for a run without a result."""
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
    return [
        Source(run, "/".join(part[-count:]).lstrip("/"))
        for run, part in zip(runs, parts, strict=True)
    ]


def require(target: str, library: str, module: str) -> None:
    """Raise `MissingExtra` unless the module can be imported."""
    if find_spec(module) is None:
        raise MissingExtra(target, library)


def unwritable(where: str, error: OSError, allowed: str = "name another --out") -> InputError:
    """What to raise where a folder, file or URI cannot be written.

    A file that stands where a folder is needed is named: the system's own words do not say which.
    """
    reason = f"cannot be written: {error.strerror or error}"
    if isinstance(error, FileExistsError | NotADirectoryError):
        path = Path(where).expanduser()
        file = next((part for part in (path, *path.parents) if part.is_file()), None)
        reason = f"cannot be written: {file} is a file" if file is not None else reason
    return InputError(where, reason, allowed)


@contextmanager
def environment(settings: Mapping[str, str]) -> Iterator[None]:
    """Set those variables that the user has not set; afterwards everything is as it was.

    Trackers' libraries read their settings there, and set some variables of their own.
    """
    before = dict(os.environ)
    os.environ.update({name: value for name, value in settings.items() if name not in before})
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


def measurement_id(trial: TrialResult) -> str:
    """Names one measurement: the same trial, run again, has the same id and another start."""
    content = f"{trial.id} {trial.started_at_seconds!r}"
    return hashlib.sha256(content.encode()).hexdigest()[:12]


def ended_at_seconds(trial: TrialResult) -> float:
    """Unix time."""
    return trial.started_at_seconds + trial.total_seconds


def values_of(trial: TrialResult) -> dict[str, float]:
    """Metric -> value, without the missing; none of a trial that did not end ok."""
    if trial.outcome is not Outcome.OK:
        return {}
    return {name: summary.value for name, summary in trial.metrics.items() if summary is not None}


def settings_of(trial: TrialResult) -> dict[str, Any]:
    """What was trained and how, by dotted key as in an experiment file; without the unset."""
    resolved = {key: trial.trial.get(key) for key in ("workload", "recipe", "slow_ranks")}
    return {
        "strategy": trial.strategy,
        **dict(_flat({"strategy": trial.strategy_options})),
        "world_size": trial.world_size,
        **dict(_flat(resolved)),
        **{key: value for key, value in _flat(trial.varied) if key != "strategy"},
        "recipe.precision": trial.precision,
        "repeat": trial.repeat,
    }


def tags_of(source: Source, trial: TrialResult) -> dict[str, str]:
    """What a trial is and how it ended, as text."""
    equivalent = source.equivalent(trial)
    failure = trial.failure
    tags = {
        "experiment": source.run.name,
        "run": source.label,
        "trial": trial.id,
        "strategy": trial.strategy,
        "outcome": str(trial.outcome),
        "synthetic": str(trial.synthetic).lower(),
        "equivalent": None if equivalent is None else str(equivalent).lower(),
        "failure": None if failure is None else failure.reason,
        "remedy": None if failure is None else failure.remedy,
    }
    return {name: value for name, value in tags.items() if value is not None}


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        elif value is not None:
            yield f"{prefix}{key}", value
