"""What every target of `shardmark export` gets, gives back and may raise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from shardmark.core.errors import InputError, ShardmarkError
from shardmark.results.schema import TrialResult
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
