"""Weights & Biases: one run a trial, offline unless the user's WANDB_MODE says otherwise."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from shlex import quote
from typing import Any

from shardmark.core.errors import InputError
from shardmark.report.export.history import history
from shardmark.report.export.source import (
    Exported,
    Source,
    environment,
    measurement_id,
    require,
    settings_of,
    tags_of,
    unwritable,
    values_of,
)
from shardmark.results.schema import Outcome, TrialResult

USUAL_PLACE = "exports/wandb"
PROJECT = "shardmark"
MODES = ("offline", "online")
SETTINGS = {"WANDB_MODE": "offline", "WANDB_ERROR_REPORTING": "false", "WANDB_SILENT": "true"}


def export_wandb(sources: Sequence[Source], out: str | None) -> Exported:
    """A folder a trial, as `wandb sync` takes it; WANDB_PROJECT, WANDB_ENTITY, ... are heeded.

    A trial that is there already is left as it is.  A folder appears whole or not at all.
    """
    mode = os.environ.get("WANDB_MODE", "offline")
    if mode not in MODES:
        raise InputError("WANDB_MODE", f"found {mode!r}", f"allowed: {', '.join(MODES)}")
    require("wandb", "wandb", "wandb")
    root = Path(out or USUAL_PLACE).expanduser()
    if root.exists() and not root.is_dir():
        raise InputError(str(root), "is a file", "name a folder")
    pending = [
        (source, trial)
        for source in sources
        for trial in source.trials
        if not any(root.glob(f"*run-*-{_run_id(trial)}"))
    ]
    if pending:
        _write(root, pending, mode)
    trials = sum(len(source.trials) for source in sources)
    look = (
        f"wandb sync {quote(str(root))}/offline-run-*"
        if mode == "offline"
        else "the project's page"
    )
    return Exported(where=str(root), trials=len(pending), kept=trials - len(pending), look=look)


def _write(root: Path, pending: Sequence[tuple[Source, TrialResult]], mode: str) -> None:
    try:
        root.mkdir(parents=True, exist_ok=True)
        with (
            environment(SETTINGS),
            tempfile.TemporaryDirectory(dir=root, prefix=".unfinished-") as scratch,
        ):
            import wandb

            try:
                for source, trial in pending:
                    _log_trial(source, trial, Path(scratch), mode)
                    (written,) = Path(scratch).glob(f"wandb/*run-*-{_run_id(trial)}")
                    written.rename(root / written.name)
            finally:
                wandb.teardown()  # ends its service process and threads
    except OSError as error:
        raise unwritable(str(root), error) from None


def _run_id(trial: TrialResult) -> str:
    return f"{trial.id}-{measurement_id(trial)}"


def _log_trial(source: Source, trial: TrialResult, folder: Path, mode: str) -> None:
    import wandb

    try:
        run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            group=source.run.name,
            job_type=trial.strategy,
            name=trial.id,
            id=_run_id(trial),
            resume="never" if mode == "online" else None,
            config={**tags_of(source, trial), **settings_of(trial)},
            tags=[trial.strategy, str(trial.outcome)],
            dir=folder,
            settings=_quiet_settings(wandb, mode),
        )
    except wandb.Error as error:
        said = f"Weights & Biases says: {error}"
        raise InputError(f"trial {trial.id}", said, "unset WANDB_MODE to export offline") from None
    run.define_metric("epoch/*", step_metric="epoch")
    for step, values in _by_step(source, trial).items():
        run.log(values, step=step)
    for name, value in values_of(trial).items():
        run.summary[name] = value
    run.summary["outcome"] = str(trial.outcome)
    run.finish(exit_code=0 if trial.outcome is Outcome.OK else 1)


def _quiet_settings(wandb: Any, mode: str) -> Any:
    """Nothing of the machine that exports: the trial was measured elsewhere, at another time."""
    return wandb.Settings(
        mode=mode,
        console="off",
        silent=True,
        disable_git=True,
        disable_code=True,
        save_code=False,
        x_disable_machine_info=True,
        x_disable_meta=True,
        x_disable_stats=True,
        x_save_requirements=False,
    )


def _by_step(source: Source, trial: TrialResult) -> dict[int, dict[str, float]]:
    """Step -> its values and time; an epoch's values stand beside its last step's."""
    by_step: dict[int, dict[str, float]] = {}
    for point in history(source, trial):
        values = by_step.setdefault(point.step, {"_timestamp": point.at_seconds})
        values[point.name] = point.value
        if point.name.startswith("epoch/"):
            values["epoch"] = point.index
    return dict(sorted(by_step.items()))
