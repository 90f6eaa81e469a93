"""What an explanation holds: two rows, how far they differ, and what was recorded of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from shardmark.analysis.compare.rows import Row
from shardmark.analysis.statistics.intervals import Estimate

Kind = Literal[
    "more ranks are slower",
    "slower than single",
    "strategy is slower",
    "sharding saves little",
    "quality differs",
    "a rank is waited for",
    "gradients are stale",
]

NOTEWORTHY = 0.05
"""A smaller relative difference needs no explanation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One recorded quantity's part of the difference."""

    name: str
    amount: float
    """In the explanation's unit; negative where it works against the difference."""
    share: float
    """Of the difference."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """One surprise and what the records say of it."""

    kind: Kind
    row: Row
    """The surprising one."""
    other: Row | None
    """What it was held against."""
    metric: str
    size: Estimate
    """How far they differ, a ratio or a difference, so that more is more surprising."""
    shown: bool
    """Whether the interval holds the difference; False with one repeat."""
    unit: Literal["seconds", "bytes", "metric"]
    difference: float
    """In `unit`; the parts and the unexplained add up to it."""
    parts: tuple[Part, ...] = ()
    """Those of which the difference consists, none counted twice."""
    unexplained: float | None = None
    """The rest of the difference; None where nothing recorded explains any of it."""
    facts: Mapping[str, float] = field(default_factory=dict)
    """Further numbers that the sentence needs, in base units."""


def parts_of(amounts: Mapping[str, float], difference: float) -> tuple[Part, ...]:
    """The named amounts with their shares, the largest first."""
    ordered = sorted(amounts.items(), key=lambda one: -one[1])
    return tuple(
        Part(name=name, amount=amount, share=amount / difference if difference else 0.0)
        for name, amount in ordered
    )
