"""Rows that train the same thing, so that strategies and numbers of ranks may compete."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardmark.bench.analysis.compare.rows import EXECUTION_KEYS, Row, gathered, plain


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparableGroup:
    """Rows that may be compared: of one experiment, workload, precision and training."""

    rows: tuple[Row, ...]
    candidates: tuple[Row, ...]
    """Rows that may win: with a finite loss, and equivalent where anything was verified."""
    by_design: tuple[Row, ...]
    """Rows that are not meant to be equivalent, such as asynchronous servers."""

    @property
    def varied(self) -> Mapping[str, Any]:
        """Values of the matrix's keys that change the training, by dotted key."""
        return conditions_of(self.rows[0])


def groups_of(rows: Sequence[Row]) -> tuple[ComparableGroup, ...]:
    """Group the rows by their training, in the order of the comparison."""
    groups = gathered(
        ((row.experiment, row.workload, row.precision, plain(conditions_of(row))), row)
        for row in rows
    )
    return tuple(map(_group, groups.values()))


def conditions_of(row: Row) -> dict[str, Any]:
    """Return the varied keys that change the training, and not only its execution."""
    return {key: value for key, value in row.varied.items() if key not in EXECUTION_KEYS}


def is_by_design(row: Row) -> bool:
    """Return whether the strategy promises something other than equivalence, and keeps it."""
    return row.equivalent is None and row.guarantee is not None


def _group(rows: Sequence[Row]) -> ComparableGroup:
    measured = [row for row in rows if row.ok_trials and row.diverged is None]
    unverified = all(row.equivalent is None and row.guarantee is None for row in measured)
    return ComparableGroup(
        rows=tuple(rows),
        candidates=tuple(
            row
            for row in measured
            # An audit cannot judge some scripts, for example for their dropout.
            if unverified or row.equivalent or (row.is_script and row.equivalent is None)
        ),
        by_design=tuple(row for row in measured if is_by_design(row)),
    )
