"""What was not calm, as the page tells it: a line beside the verdict, and all of it to unfold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardmark.analysis.advise.groups import groups_of
from shardmark.analysis.compare.rows import Row
from shardmark.analysis.diagnose.stability import Instability
from shardmark.analysis.statistics.verdicts import BASELINE
from shardmark.results.schema import StabilityKind

DOUBTFUL = (StabilityKind.TRIAL_DRIFT, StabilityKind.RUN_DRIFT, StabilityKind.OUTLYING_REPEAT)
"""Kinds that move a mean, and with it a verdict or a recommendation."""
_MANY = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class KindOfWarnings:
    """All warnings of one kind, the worst first."""

    kind: str
    lines: tuple[str, ...]
    remedy: str


def by_kind(warnings: Sequence[Instability]) -> tuple[KindOfWarnings, ...]:
    """In the order of the warnings."""
    return tuple(
        KindOfWarnings(
            kind=kind,
            lines=tuple(f"{one.place}: {one.text}" for one in warnings if one.kind == kind),
            remedy=next(one.remedy for one in warnings if one.kind == kind),
        )
        for kind in dict.fromkeys(one.kind for one in warnings)
    )


def doubt(rows: Sequence[Row], warnings: Sequence[Instability]) -> str:
    """Which baselines and candidates drifted, or have a repeat far from the others; or nothing."""
    decisive = _decisive(rows)
    drifting = any(one.kind is StabilityKind.RUN_DRIFT for one in warnings)
    places = {one.place for one in warnings if one.kind in DOUBTFUL}
    found = [row.place for row in decisive if any(trial.id in places for trial in row.trials)]
    parts = ["the machine drifted over the repeats"] if drifting else []
    if found:
        named = "; ".join(found[:_MANY])
        more = f"; {len(found) - _MANY} more" if len(found) > _MANY else ""
        parts.append(
            f"{len(found)} of the {len(decisive)} rows that decide"
            f" {'has' if len(found) == 1 else 'have'} a trial that drifted or"
            f" lies apart ({named}{more})"
        )
    return f"Not calm: {', and '.join(parts)}." if parts else ""


def _decisive(rows: Sequence[Row]) -> list[Row]:
    """The baselines, and whatever competes for a recommendation."""
    chosen = {id(row) for group in groups_of(rows) for row in group.candidates}
    return [row for row in rows if id(row) in chosen or row.verdict == BASELINE]
