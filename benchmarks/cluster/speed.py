"""Speeds of links as people write them."""

from __future__ import annotations

import math
import re

from shardmark.core.errors import InputError

UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}
UNLIMITED = "unlimited"
LEAST_BITS_PER_SECOND = 1e4
_SPEED = re.compile(r"([0-9]+(?:\.[0-9]+)?) *([kmg]?)bit(?:/s)?", re.IGNORECASE)


def bits_per_second(text: str) -> float | None:
    """`1gbit`, `200mbit/s`; None for `unlimited`.  Raises `InputError`."""
    if text.lower() == UNLIMITED:
        return None
    found = _SPEED.fullmatch(text.strip())
    speed = float(found[1]) * UNITS[found[2].lower()] if found else math.nan
    if not speed >= LEAST_BITS_PER_SECOND:
        raise InputError(
            "link speed", f"found {text!r}", "allowed: unlimited, or such as 10gbit, 200mbit"
        )
    return speed
