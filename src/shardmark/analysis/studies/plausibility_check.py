"""What a check of published figures is, and what it finds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Side = Literal["at most", "at least", "about"]
"""What arithmetic allows the published value to be, relative to the limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One kind of arithmetic that figures can contradict."""

    name: str
    assumption: str
    """In words: what must hold for the limit to hold."""
    formula: str
    margin: float
    """Fraction of the limit by which a figure may miss it, beside its rounding."""

    def contradicted(
        self, published: float, limit: float, side: Side, *, rounding: float = 0.0
    ) -> bool:
        """Whether the figure misses the limit by more than margin and rounding."""
        slack = self.margin * abs(limit) + rounding
        over, under = published > limit + slack, published < limit - slack
        return {"at most": over, "at least": under, "about": over or under}[side]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One published figure that contradicts arithmetic."""

    check: Check
    subject: str
    """What the figure is of, short enough for a table."""
    words: str = ""
    """What the study says of the figure, in its own words or close to them."""
    place: str
    metric: str
    """Of the catalogue; in which unit both numbers are."""
    published: float
    side: Side
    limit: float
    basis: str
    """The numbers that the limit comes from, and whose they are."""
    meaning: str
    """What follows, without a guess at what happened."""
    parts: tuple[tuple[str, float], ...] = ()
    """Further amounts in the metric's unit, by their names."""
    digit: float | None = None
    """Unit of the published value's last printed digit, in the metric's; None for a computed one
    of which it is not known."""
    limit_digit: float | None = None
    """That of the limit, where the limit is a published value, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Examined:
    """One check over a whole study."""

    check: Check
    figure_count: int
    """Figures that it could be applied to."""
    findings: tuple[Finding, ...]


def examined(check: Check, found: list[Finding | None]) -> Examined:
    """`found` has an entry for each figure that the check was applied to: None where it holds."""
    findings = tuple(one for one in found if one is not None)
    return Examined(check=check, figure_count=len(found), findings=findings)
