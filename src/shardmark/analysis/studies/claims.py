"""What a study claims as a range over another strategy, beside what was measured of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from shardmark.analysis.compare.rows import Row
from shardmark.analysis.statistics.intervals import Estimate, estimate_mean
from shardmark.analysis.studies.against import Against, find_row, given, measured_ratio
from shardmark.analysis.studies.statements import Reference, Statement


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One claim and one measured row that it is about."""

    statement: Statement
    row: Row | None
    base: Row | None
    """What it is relative to, measured."""
    measured: Estimate | None


def claims_of(against: Against) -> tuple[Claim, ...]:
    """Every range of the study, and every ratio of one strategy to another, with each measured row
    of its strategy and conditions.

    Without a row where nothing was measured, or the study does not say what the claim is relative
    to; with each strategy in turn where the study does not say which of several it was.
    """
    return tuple(
        claim
        for statement in against.paper.statements
        if _is_claim(statement)
        for claim in _claims(statement, against.rows)
    )


def _is_claim(statement: Statement) -> bool:
    """A speed-up of a strategy over itself on fewer ranks stands in the headline."""
    if (statement.low, statement.high) != (None, None):
        return True
    relative = statement.relative_to
    return (
        statement.value is not None and relative is not None and relative.title != statement.title
    )


def _claims(statement: Statement, rows: Sequence[Row]) -> list[Claim]:
    found = [row for row in rows if row.ok_trials and _is_about(statement, row)]
    relative = statement.relative_to
    if relative is None or not found:
        return [Claim(statement=statement, row=None, base=None, measured=None)]
    return [claim for row in found for claim in _of_row(statement, relative, row, rows)]


def _is_about(statement: Statement, row: Row) -> bool:
    return (
        row.strategy in statement.strategies
        and _is_as_large(statement, row)
        and all(
            given(row.trials[0].trial, key) == value for key, value in statement.conditions.items()
        )
    )


def _is_as_large(statement: Statement, row: Row) -> bool:
    """By nodes where the study speaks of them."""
    if statement.nodes is not None:
        return row.nodes == statement.nodes
    return statement.world_size in (None, row.world_size)


def _of_row(
    statement: Statement, relative: Reference, row: Row, rows: Sequence[Row]
) -> list[Claim]:
    """One for each strategy that it may be relative to and that was measured, or one without."""
    ranks = relative.world_size or row.world_size
    if statement.nodes is not None:
        nodes = relative.nodes or row.nodes
        rows = [other for other in rows if other.nodes == nodes]
    bases = [find_row(row, rows, ranks, strategy) for strategy in relative.strategies]
    measured: list[Row | None] = [base for base in bases if base is not None]
    return [
        Claim(statement=statement, row=row, base=base, measured=_measured(statement, row, base))
        for base in measured or [None]
    ]


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
