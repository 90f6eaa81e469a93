"""Metrics in words, and published figures with the digits that the study prints."""

from __future__ import annotations

from math import floor, log10

from shardmark.analysis.studies.schema import Figures, Paper
from shardmark.core.metrics import METRICS
from shardmark.report.studies.quantities import Quantity, quantity
from shardmark.report.table.table import number

_LABELS = {
    "epoch_seconds": "epoch time",
    "total_seconds": "total time",
    "samples_per_second": "throughput",
    "speedup": "speed-up",
    "peak_memory_bytes": "peak memory",
    "memory_ratio": "peak memory",
    "network_bytes_per_second": "network bandwidth",
    "train_loss": "training loss",
    "accuracy_top1": "top-1 accuracy",
    "accuracy_top5": "top-5 accuracy",
    "map": "mAP",
    "map_50": "mAP@50",
    "map_75": "mAP@75",
}
_UNITS = ("_seconds", "_bytes", "_per_second")
GIGABYTES = Quantity("peak (GB)", scale=1e-9, decimals=4)
"""Decimal, as studies print memory."""


def label(metric: str) -> str:
    """The metric in a few words, the same in every table and note."""
    if metric in _LABELS:
        return _LABELS[metric]
    known = METRICS.get(metric)
    name = metric
    for unit in _UNITS if known is not None else ():
        name = name.removesuffix(unit)
    return name.replace("_", " ")


def shown_as(metric: str) -> Quantity:
    """How a study's table shows the metric."""
    return GIGABYTES if metric == "peak_memory_bytes" else quantity(metric)


def printed(value: float, digit: float | None, scale: float = 1.0) -> str | None:
    """The number times `scale`, to the study's last digit; None where that is not known."""
    if digit is None:
        return None
    return number(value * scale, decimals=max(0, -floor(log10(digit * scale) + 1e-9)))


def published_cell(paper: Paper, figures: Figures | None, metric: str, value: float | None) -> str:
    """As the study prints it; what is computed from its figures in the metric's usual form."""
    form = shown_as(metric)
    if value is None or figures is None:
        return ""
    own = metric in figures.stated
    text = printed(value, paper.digit(figures, metric), form.scale) if own else None
    return form.show(value) if text is None else text
