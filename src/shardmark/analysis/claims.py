"""What a study claims as a range over another strategy, beside what was measured of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from shardmark.analysis.against import Against, find_row, given, measured_ratio
from shardmark.analysis.rows import Row
from shardmark.analysis.statistics import Estimate, estimate_mean
from shardmark.papers.schema import Reference, Statement


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One claim and one measured row that it is about."""

    statement: Statement
    row: Row | None
    base: Row | None
    """What it is relative to, measured."""
    measured: Estimate | None


def claims_of(against: Against) -> tuple[Claim, ...]:
    """Every range of the study, with each measured row of its strategy and conditions.

    Without a row where the study does not say what the range is relative to.
    """
    return tuple(
        claim
        for statement in against.paper.statements
        if (statement.low, statement.high) != (None, None)
        for claim in _claims(statement, against.rows)
    )


def _claims(statement: Statement, rows: Sequence[Row]) -> list[Claim]:
    found = [row for row in rows if row.ok_trials and _is_about(statement, row)]
    if statement.relative_to is None or not found:
        return [Claim(statement=statement, row=None, base=None, measured=None)]
    return [_claim(statement, statement.relative_to, row, rows) for row in found]


def _is_about(statement: Statement, row: Row) -> bool:
    return (
        row.strategy == statement.strategy
        and statement.world_size in (None, row.world_size)
        and all(
            given(row.trials[0].trial, key) == value for key, value in statement.conditions.items()
        )
    )


def _claim(statement: Statement, relative: Reference, row: Row, rows: Sequence[Row]) -> Claim:
    base = find_row(row, rows, relative.world_size or row.world_size, relative.strategy)
    return Claim(statement=statement, row=row, base=base, measured=_measured(statement, row, base))


def _measured(statement: Statement, row: Row, base: Row | None) -> Estimate | None:
    """Times are those for the same samples, so that a run without whole epochs has them, too."""
    if base is None:
        return None
    if statement.relation == "difference":
        return _difference(row, base, statement.about)
    if statement.about == "epoch_seconds":
        return measured_ratio(base, row)
    ratio_of = {"speedup": "samples_per_second", "memory_ratio": "peak_memory_bytes"}
    return measured_ratio(row, base, ratio_of.get(statement.about, statement.about))


def _difference(row: Row, base: Row, metric: str) -> Estimate | None:
    """With an interval only where both have the same repeats."""
    one, other = row.values.get(metric), base.values.get(metric)
    if not one or not other:
        return None
    if one.keys() == other.keys():
        return estimate_mean([one[repeat] - other[repeat] for repeat in one])
    value = fmean(one.values()) - fmean(other.values())
    return Estimate(value=value, low=None, high=None, n=min(len(one), len(other)))
