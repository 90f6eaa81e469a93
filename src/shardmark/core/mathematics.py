"""What a strategy computes on purpose, where that is not one device's mathematics."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Mathematics:
    """Without any field set it is that of one device; `verify`'s reference computes what is set."""


ONE_DEVICE = Mathematics()
