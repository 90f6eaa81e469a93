"""How a metric is shown in a table: its short title, its human unit, its decimals."""

from __future__ import annotations

from dataclasses import dataclass

from shardmark.analysis.statistics.intervals import Estimate
from shardmark.report.table.table import number


@dataclass(frozen=True, slots=True)
class Quantity:
    title: str
    scale: float = 1.0
    decimals: int | None = None
    """None for about four significant digits."""

    def show(self, value: float | Estimate | None) -> str:
        """The number, with ± half its interval where it has one; blank for None.

        A plain number is a published one: a whole one gets no decimals that nobody measured.
        """
        if value is None:
            return ""
        if not isinstance(value, Estimate):
            scaled = value * self.scale
            whole = self.decimals is None and scaled.is_integer()
            return number(scaled, decimals=0 if whole else self.decimals)
        text = number(value.value * self.scale, decimals=self.decimals)
        if value.half_width is None:
            return text
        places = len(text.partition(".")[2])
        return f"{text} ±{value.half_width * self.scale:.{places}f}"


_QUANTITIES = {
    "epoch_seconds": Quantity("time (s)"),
    "elapsed_seconds": Quantity("since start (s)"),
    "total_seconds": Quantity("total (s)"),
    "evaluation_seconds": Quantity("eval. (s)"),
    "train_loss": Quantity("avg loss", decimals=4),
    "validation_loss": Quantity("val. loss", decimals=4),
    "map": Quantity("mAP", decimals=4),
    "map_50": Quantity("mAP@50", decimals=4),
    "map_75": Quantity("mAP@75", decimals=4),
    "accuracy_top1": Quantity("top-1 (%)", scale=100, decimals=1),
    "accuracy_top5": Quantity("top-5 (%)", scale=100, decimals=1),
    "peak_memory_bytes": Quantity("peak (MiB)", scale=2.0**-20),
}


def quantity(name: str) -> Quantity:
    """That of the metric; one of no table's own in base units, under its own name."""
    return _QUANTITIES.get(name, Quantity(name))
