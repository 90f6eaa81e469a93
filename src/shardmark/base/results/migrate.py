"""Reads what earlier versions stored and this one does not.  Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

REMOVED_METRICS = frozenset(
    {"lost_samples", "restarts", "lost_seconds", "checkpoint_seconds", "checkpoint_bytes"}
)
"""Metrics of restarts inside a trial, and of workers that died while others trained on."""


def without_restarts(stored: Any) -> Any:
    """Return a stored trial without fields of restarts; anything else is returned unchanged.

    A trial that trained on without a worker that had died is `failed` and has no metrics, as today.
    """
    if not isinstance(stored, Mapping):
        return stored
    trial = {key: value for key, value in stored.items() if key != "restarts"}
    for key in ("metrics", "missing"):
        if isinstance(values := trial.get(key), Mapping):
            trial[key] = {name: values[name] for name in values if name not in REMOVED_METRICS}
    if isinstance(ranks := trial.get("ranks"), list | tuple):
        trial["ranks"] = [_rank_without_restarts(rank) for rank in ranks]
        for rank in ranks:
            death = rank.get("lost") if isinstance(rank, Mapping) else None
            if death is not None and trial.get("outcome") == "ok":
                trial |= {"outcome": "failed", "failure": {"reason": f"a worker {death}"}}
                trial |= {"metrics": {}, "missing": {}, "stability": []}
    return trial


def _rank_without_restarts(rank: Any) -> Any:
    if not isinstance(rank, Mapping):
        return rank
    removed = ("lost", "checkpoints", "resumes")
    record = {key: value for key, value in rank.items() if key not in removed}
    if isinstance(exchange := record.get("exchange"), Mapping):
        record["exchange"] = {key: exchange[key] for key in exchange if key != "lost_samples"}
    return record
