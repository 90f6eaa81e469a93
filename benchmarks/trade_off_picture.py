"""Draws the README's picture: throughput against peak memory of a stored comparison.

    python benchmarks/trade_off_picture.py FILE [--where KEY=VALUE]... [--out docs/images/NAME.svg]

FILE is what `shardmark compare --format json` prints, or a `.json` of benchmarks/results that holds
such rows.  `--where` keeps the rows that have the value, such as `workload.model=resnet18`.
Measures nothing.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shardmark.report.figures.chart import Series, figure
from shardmark.report.figures.drawing import draw, figure_svg
from shardmark.report.figures.measured import trade_off_panel
from shardmark.report.table.table import byte_unit

OUT = Path(__file__).resolve().parents[1] / "docs" / "images" / "throughput-memory.svg"
MOST_BYTES = 100_000
RATE, PEAK = "samples_per_second", "peak_memory_bytes"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--where", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args()
    rows = kept(json.loads(given.file.read_text())["rows"], given.where)
    if not rows:
        raise SystemExit(f"{given.file}: no such row has throughput and peak memory")
    svg = picture(rows)
    if len(svg.encode()) > MOST_BYTES:
        raise SystemExit(f"{len(svg)} bytes: too large for a README")
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(svg)
    print(f"{given.out}: {len(rows)} cells, {len(svg) / 1000:.0f} kB")


def kept(rows: Sequence[dict[str, Any]], conditions: Sequence[str]) -> list[dict[str, Any]]:
    """Rows with both metrics that meet every condition."""
    wanted = [condition.partition("=") for condition in conditions]
    return [
        row
        for row in rows
        if row["metrics"].get(RATE)
        and row["metrics"].get(PEAK)
        and all(str(row.get(key)) == value for key, _, value in wanted)
    ]


def picture(rows: Sequence[dict[str, Any]]) -> str:
    """One panel; the frontier is that of what is verified, where anything is."""
    unit, size = byte_unit(max(row["metrics"][PEAK]["value"] for row in rows))
    by_strategy: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_strategy.setdefault(row["strategy"], []).append(row)
    verified = [row for row in rows if row["equivalent"]]
    panel = trade_off_panel(
        "",
        [cells(strategy, own, size) for strategy, own in by_strategy.items()],
        [
            (row["metrics"][PEAK]["value"] / size, row["metrics"][RATE]["value"])
            for row in verified or rows
        ],
        unit,
    )
    (drawing,) = draw(figure("throughput-memory", "Speed against memory", [panel]))
    return figure_svg(drawing)


def cells(strategy: str, rows: Sequence[dict[str, Any]], size: float) -> Series:
    """One mark a cell, named by its strategy; by its ranks, too, where there are several."""
    rates = [row["metrics"][RATE] for row in rows]
    names = [f"{strategy}, {row['world_size']}" if len(rows) > 1 else strategy for row in rows]
    return Series(
        name=strategy,
        x=[row["metrics"][PEAK]["value"] / size for row in rows],
        y=[rate["value"] for rate in rates],
        low=[rate["low"] for rate in rates],
        high=[rate["high"] for rate in rates],
        text=names,
        places=names,
    )


if __name__ == "__main__":
    main()
