"""Rows that train the same thing, so that strategies and numbers of ranks may compete."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardmark.analysis.compare.rows import EXECUTION_KEYS, Row, plain
from shardmark.results.schema import Outcome

HEADLINE_QUALITIES = ("accuracy_top1", "map", "perplexity", "validation_loss")
"""What may stand for quality, the most telling first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparableGroup:
    """All rows of one experiment, workload, precision and training."""

    experiment: str
    workload: str
    precision: str
    varied: Mapping[str, Any]
    """What varies and changes the training, by dotted key."""
    rows: tuple[Row, ...]
    candidates: tuple[Row, ...]
    """Rows with a result that may win: shown to be equivalent, or nothing was verified."""
    by_design: tuple[Row, ...]
    """Rows that are not meant to be equivalent, such as asynchronous servers."""

    @property
    def out_of_memory(self) -> tuple[Row, ...]:
        return tuple(
            row
            for row in self.rows
            if not row.ok_trials and row.outcomes.get(Outcome.OUT_OF_MEMORY)
        )


def groups_of(rows: Sequence[Row]) -> tuple[ComparableGroup, ...]:
    """The rows by what they train, in the order of the comparison."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        key = (row.experiment, row.workload, row.precision, plain(conditions_of(row)))
        groups.setdefault(key, []).append(row)
    return tuple(_group(members) for members in groups.values())


def headline_quality(rows: Sequence[Row]) -> str | None:
    """The quality that most rows have; None where the data are made up or nothing was evaluated."""
    if any(row.synthetic for row in rows):
        return None
    counts = {name: sum(bool(row.metrics.get(name)) for row in rows) for name in HEADLINE_QUALITIES}
    best = max(HEADLINE_QUALITIES, key=lambda name: counts[name])
    return best if counts[best] else None


def conditions_of(row: Row) -> dict[str, Any]:
    """The varied keys that change what is trained, not only how."""
    return {key: value for key, value in row.varied.items() if key not in EXECUTION_KEYS}


def is_by_design(row: Row) -> bool:
    """Whether the row is not meant to be equivalent, and keeps what it guarantees instead."""
    return row.equivalent is None and row.guarantee is not None


def _group(rows: Sequence[Row]) -> ComparableGroup:
    measured = [row for row in rows if row.ok_trials and not _lost_rank(row)]
    unverified = all(row.equivalent is None and row.guarantee is None for row in measured)
    first = rows[0]
    return ComparableGroup(
        experiment=first.experiment,
        workload=first.workload,
        precision=first.precision,
        varied=conditions_of(first),
        rows=tuple(rows),
        candidates=tuple(row for row in measured if unverified or row.equivalent is True),
        by_design=tuple(row for row in measured if is_by_design(row)),
    )


def _lost_rank(row: Row) -> bool:
    """Its rates are then those of the ranks that were left."""
    return any(rank.lost is not None for trial in row.ok_trials for rank in trial.ranks)
