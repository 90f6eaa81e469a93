"""Weights & Biases: one run a trial, offline unless the user's WANDB_MODE says otherwise."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from shlex import quote
from typing import Any

from shardmark.core.errors import InputError
from shardmark.core.storage import storage_error
from shardmark.report.export.source import Exported, Source, require
from shardmark.report.export.tracked import TrackedTrial, environment, tracked

MODES = ("offline", "online")
SETTINGS = {"WANDB_MODE": "offline", "WANDB_ERROR_REPORTING": "false", "WANDB_SILENT": "true"}
QUIET: dict[str, Any] = {
    "console": "off",
    "silent": True,
    "disable_git": True,
    "disable_code": True,
    "save_code": False,
    "x_disable_machine_info": True,
    "x_disable_meta": True,
    "x_disable_stats": True,
    "x_save_requirements": False,
}
"""Nothing of the machine that exports: the trial was measured elsewhere, at another time."""


def export_wandb(sources: Sequence[Source], out: str | None) -> Exported:
    """A folder a trial, as `wandb sync` takes it; WANDB_PROJECT, WANDB_ENTITY, ... are heeded.

    A trial that is there already is left as it is.  A folder appears whole or not at all.
    """
    mode = os.environ.get("WANDB_MODE", "offline")
    if mode not in MODES:
        raise InputError("WANDB_MODE", f"found {mode!r}", f"allowed: {', '.join(MODES)}")
    require("wandb", "wandb", "wandb")
    root = Path(out or "exports/wandb").expanduser()
    trials = tracked(sources)
    pending = [trial for trial in trials if not any(root.glob(f"*run-*-{_run_id(trial)}"))]
    try:
        root.mkdir(parents=True, exist_ok=True)
        if pending:
            _write(root, pending, mode)
    except OSError as error:
        raise storage_error(root, error) from None
    sync = f"wandb sync {quote(str(root))}/offline-run-*"
    return Exported(
        where=str(root),
        trials=len(pending),
        kept=len(trials) - len(pending),
        look=sync if mode == "offline" else "the project's page",
    )


def _write(root: Path, pending: Sequence[TrackedTrial], mode: str) -> None:
    scratch = tempfile.TemporaryDirectory(dir=root, prefix=".unfinished-")
    with environment(SETTINGS), scratch as folder:
        import wandb

        try:
            for trial in pending:
                _log_trial(trial, Path(folder), mode)
                (written,) = Path(folder).glob(f"wandb/*run-*-{_run_id(trial)}")
                written.rename(root / written.name)
        finally:
            wandb.teardown()  # ends its service process and threads


def _run_id(trial: TrackedTrial) -> str:
    return f"{trial.result.id}-{trial.measurement}"


def _log_trial(trial: TrackedTrial, folder: Path, mode: str) -> None:
    import wandb

    outcome = str(trial.result.outcome)
    try:
        run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "shardmark"),
            group=trial.source.run.name,
            name=trial.result.id,
            id=_run_id(trial),
            resume="never" if mode == "online" else None,
            config={**trial.tags, **trial.settings},
            tags=[trial.result.strategy, outcome],
            dir=folder,
            settings=wandb.Settings(**{"mode": mode, **QUIET}),
        )
    except wandb.Error as error:
        said = f"Weights & Biases says: {error}"
        remedy = "unset WANDB_MODE to export offline"
        raise InputError(f"trial {trial.result.id}", said, remedy) from None
    run.define_metric("epoch/*", step_metric="epoch")
    for step, values in _by_step(trial).items():
        run.log(values, step=step)
    run.summary.update({**trial.final, "outcome": outcome})
    run.finish(exit_code=0 if trial.ok else 1)


def _by_step(trial: TrackedTrial) -> dict[int, dict[str, Any]]:
    """Step -> its values and time; an epoch's values stand beside its last step's."""
    by_step: dict[int, dict[str, Any]] = {}
    for point in trial.history():
        values = by_step.setdefault(point.step, {"_timestamp": point.at_seconds})
        values[point.name] = point.value
        if point.name.startswith("epoch/"):
            values["epoch"] = point.index
    return dict(sorted(by_step.items()))
