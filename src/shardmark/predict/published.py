"""Published speeds, of which an answer without a measurement shows the nearest."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from math import log

from pydantic import TypeAdapter

from shardmark.base.table.table import abbreviated

MOST_TIMES = 4
"""Largest ratio of the sizes of two models of which one is shown beside the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedSpeed:
    """A row of `published.csv`, which `benchmarks/predict.py` writes from rows with sources."""

    source: str
    model: str
    parameters: float
    unit: str
    """`tokens` or `samples`."""
    length: float
    """Tokens of a sample; 1 for samples without tokens."""
    precision: str
    strategy: str
    card: str
    devices: int
    rate: float
    """Tokens or samples in a second on each device."""
    planned: float
    """The same as it is planned without a measurement."""

    def __str__(self) -> str:
        length = f", {self.length:,.0f} tokens" if self.unit == "tokens" else ""
        rate, planned = abbreviated(self.rate), abbreviated(self.planned)
        return (
            f"{self.model} on {self.devices}x{self.card}, {self.strategy}{length}:"
            f" {rate} {self.unit}/s a GPU ({self.source}); planned {planned}"
        )


@cache
def published_speeds() -> tuple[PublishedSpeed, ...]:
    """Return the published speeds that ship."""
    text = files("shardmark.predict").joinpath("published.csv").read_text(encoding="utf-8")
    rows = TypeAdapter(tuple[PublishedSpeed, ...])
    return rows.validate_python([*csv.DictReader(text.splitlines())])


def nearest_published(
    card: str, unit: str, precision: str, *, parameters: int, length: float, devices: int
) -> PublishedSpeed | None:
    """Return the speed of a like training on the card; None if no model has about its size.

    The size of the model counts most, then the length of its samples, then the devices.
    """

    def distance(row: PublishedSpeed) -> float:
        ratios = (parameters / row.parameters, length / row.length, devices / row.devices)
        of_size, of_length, of_devices = (abs(log(ratio)) for ratio in ratios)
        return of_size + of_length / 2 + of_devices / 4

    like = [
        row
        for row in published_speeds()
        if (row.card, row.unit) == (card, unit)
        and (row.precision == "fp32") == (precision == "fp32")
        and 1 / MOST_TIMES <= parameters / row.parameters <= MOST_TIMES
    ]
    return min(like, key=distance, default=None)
