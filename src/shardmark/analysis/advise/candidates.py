"""Which rows of a comparison compete for a recommendation, and why the others do not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardmark.analysis.compare.rows import EXECUTION_KEYS, Row, plain
from shardmark.results.schema import Outcome

HEADLINE_QUALITIES = ("accuracy_top1", "map", "perplexity", "validation_loss")
"""What may stand for quality, the most telling first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """A row that is not recommended."""

    row: Row
    cause: str
    """`not equivalent`, `not verified`, `rank lost`, or the outcome."""
    reason: str
    """In words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """Rows that train the same thing, so that strategies and numbers of ranks compete."""

    experiment: str
    workload: str
    precision: str
    varied: Mapping[str, Any]
    """What varies and changes the training, by dotted key."""
    rows: tuple[Row, ...]
    candidates: tuple[Row, ...]
    weaker: tuple[Row, ...]
    """They promise less than equivalence, and keep it."""
    left_out: tuple[LeftOut, ...]
    unverified: bool
    """Nothing was verified: the recommendation rests on an equivalence that nobody has shown."""

    @property
    def fits(self) -> Mapping[int, tuple[tuple[Row, ...], tuple[Row, ...]]]:
        """World size -> rows that ran and rows that ran out of memory, where there are both."""
        found = {}
        for size in sorted({row.world_size for row in self.rows}):
            rows = [row for row in self.rows if row.world_size == size]
            ran = tuple(row for row in rows if row.ok_trials)
            full = tuple(
                row for row in rows if not row.ok_trials and row.outcomes.get(Outcome.OUT_OF_MEMORY)
            )
            if ran and full:
                found[size] = ran, full
        return found


def fields_of(rows: Sequence[Row]) -> tuple[Field, ...]:
    """The rows by what they train, in the order of the comparison."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        key = (row.experiment, row.workload, row.precision, plain(conditions_of(row)))
        groups.setdefault(key, []).append(row)
    return tuple(_field(group) for group in groups.values())


def headline_qualities(rows: Sequence[Row]) -> tuple[str, ...]:
    """Metrics that were evaluated, that first which stands for quality: the one most rows have.

    None where the data are made up, so that quality means nothing.
    """
    if any(row.synthetic for row in rows):
        return ()
    counts = {name: sum(bool(row.metrics.get(name)) for row in rows) for name in HEADLINE_QUALITIES}
    known = [name for name in HEADLINE_QUALITIES if counts[name]]
    return tuple(sorted(known, key=lambda name: -counts[name]))


def conditions_of(row: Row) -> dict[str, Any]:
    """The varied keys that change what is trained, not only how."""
    return {key: value for key, value in row.varied.items() if key not in EXECUTION_KEYS}


def _field(rows: Sequence[Row]) -> Field:
    measured = [row for row in rows if row.ok_trials]
    unverified = bool(measured) and all(
        row.equivalent is None and row.guarantee is None for row in measured
    )
    causes = {id(row): _cause(row, unverified=unverified) for row in rows}
    first = rows[0]
    return Field(
        experiment=first.experiment,
        workload=first.workload,
        precision=first.precision,
        varied=conditions_of(first),
        rows=tuple(rows),
        candidates=tuple(row for row in rows if causes[id(row)] is None and not _weaker(row)),
        weaker=tuple(row for row in rows if causes[id(row)] is None and _weaker(row)),
        left_out=tuple(cause for row in rows if (cause := causes[id(row)]) is not None),
        unverified=unverified,
    )


def _weaker(row: Row) -> bool:
    return row.equivalent is None and row.guarantee is not None


def _cause(row: Row, *, unverified: bool) -> LeftOut | None:
    """Why the row does not compete; None where it does."""
    if not row.ok_trials:
        outcome = max(row.outcomes, key=lambda name: row.outcomes[name], default="no result")
        reason = next((one.reason for one in row.failed if one.outcome == outcome), "no trial")
        return LeftOut(row=row, cause=str(outcome), reason=reason)
    if row.equivalent is False:
        reason = row.deviation or "the cause is not known"
        return LeftOut(row=row, cause="not equivalent", reason=reason)
    lost = [rank for trial in row.ok_trials for rank in trial.ranks if rank.lost is not None]
    if lost:
        reason = f"rank {lost[0].rank} {lost[0].lost}, and the numbers are the survivors'"
        return LeftOut(row=row, cause="rank lost", reason=reason)
    if row.equivalent is None and row.guarantee is None and not unverified:
        reason = "nothing shows that it trains what the others train"
        return LeftOut(row=row, cause="not verified", reason=reason)
    return None
