"""Durations as text: formatting, and parsing of command-line arguments."""

from __future__ import annotations

import re

from shardmark.base.errors import InputError

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


def duration(seconds: float) -> str:
    """Format a duration, such as `0.3 s`, `45 s`, `12 min` or `3 h 20 min`."""
    if 0 < seconds < 1:
        return f"{seconds:.1g} s"
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"


def parse_seconds(text: str, option: str) -> float:
    """Parse a duration such as `90s`, `30m`, `2h` or `1h30m`.

    Raises `InputError`, which names the option.
    """
    parts = re.findall(r"(\d+(?:\.\d+)?)([smh])", text)
    seconds = sum(float(number) * _UNITS[unit] for number, unit in parts)
    if not seconds or "".join(number + unit for number, unit in parts) != text:
        raise InputError(option, f"found {text!r}", "allowed is a time such as 90s, 30m or 1h30m")
    return seconds
