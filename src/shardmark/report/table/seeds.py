"""Says where repeats share a seed: then no interval of a quality holds the luck of a seed."""

from __future__ import annotations

from collections.abc import Sequence

from shardmark.analysis.compare.rows import Row
from shardmark.core.metrics import METRICS

_NO_SPREAD = (
    "Repeats share a seed: losses and qualities, and their intervals, say nothing of another one."
)


def seeds_note(rows: Sequence[Row]) -> list[str]:
    """One note, where some row has a quality and repeats, and each row's repeats one seed."""
    having = [row for row in rows if len(row.ok_trials) > 1 and _has_quality(row)]
    return [_NO_SPREAD] if having and not any(map(_seeds_differ, having)) else []


def _has_quality(row: Row) -> bool:
    return not row.synthetic and any(
        row.metrics.get(name) is not None
        for name, metric in METRICS.items()
        if metric.group == "quality"
    )


def _seeds_differ(row: Row) -> bool:
    """Without a recorded seed too: then it was the experiment's one."""
    return len({trial.trial.get("recipe", {}).get("seed") for trial in row.ok_trials}) > 1
