"""Checks of values against a reference.  Imports little: stored verdicts have them."""

from __future__ import annotations

from shardmark.base.files.stored import Stored

LARGEST = 1e300
"""Represents a difference that is not finite, because JSON has no infinity."""


class Check(Stored):
    """A quantity that is compared with the reference."""

    name: str
    holds: bool
    found: float | str
    expected: float | str
    tolerance: float | None
    """Maximum difference; None if the values must be equal."""
    where: str | None = None
    """Rank, step or tensor with the largest difference, to which `found` belongs."""
    in_tolerances: float | None = None
    """The difference in units of the tolerance."""
