"""The one unit in which a figure shows its values."""

from __future__ import annotations

_BYTES = (("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10))
_RATES = (("GB/s", 1e9), ("MB/s", 1e6), ("kB/s", 1e3))


def byte_unit(largest_bytes: float) -> tuple[str, float]:
    """Name and bytes of the binary unit that suits the largest value."""
    return next((unit for unit in _BYTES if largest_bytes >= unit[1]), _BYTES[-1])


def rate_unit(largest_bytes_per_second: float) -> tuple[str, float]:
    """The same for network rates, in decimal units as networks have them."""
    return next((unit for unit in _RATES if largest_bytes_per_second >= unit[1]), _RATES[-1])
