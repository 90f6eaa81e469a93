"""Every metric's name, unit, definition and source: tables, docs and reports are made from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Group = Literal[
    "time", "rate", "memory", "network", "processes", "device", "quality", "servers", "errors"
]
Over = Literal["maximum", "sum", "mean", "trial"]
Better = Literal["lower", "higher"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One line of `shardmark list metrics`."""

    name: str
    unit: str
    """Base units: seconds, bytes, samples/s, FLOP/s, ratio, percent, watts, joules, ..."""
    group: Group
    over: Over
    """How a trial's value comes from its ranks; `trial` where it is not a rank's."""
    better: Better | None
    definition: str
    source: str = ""
    """Where the number is read: clock, allocator, /proc, NVML, ..."""
