"""Stores the comparison and the verdicts of a run, and can draw its throughput over peak memory.

    python benchmarks/results_table.py RUN NAME [--picture FILE.svg]

Writes `DATE-NAME.md`, `DATE-NAME.json` (every metric of every row) and, if the run was verified,
`DATE-NAME-verification.json` to benchmarks/results/.  `--picture` draws the picture of the README.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import RESULTS, surroundings_in, surroundings_line

from shardmark.analysis.compare.comparison import compare
from shardmark.report.figures.chart import Series, figure
from shardmark.report.figures.drawing import draw, figure_svg
from shardmark.report.figures.measured import trade_off_panel
from shardmark.report.table.comparison import comparison_json, comparison_table
from shardmark.report.table.formats import Format, render_tables
from shardmark.report.table.table import byte_unit
from shardmark.results.store import RunFolder, load_run
from shardmark.results.verification import Verification

MOST_PICTURE_BYTES = 100_000
RATE, PEAK = "samples_per_second", "peak_memory_bytes"


def verdict_lines(verification: Verification | None) -> list[str]:
    """A table with the largest deviation of each verdict in units of its tolerance."""
    if verification is None:
        return ["Not verified."]
    lines = [
        "| model | strategy | ranks | equivalent | largest deviation / tolerance |",
        "|---" * 5 + "|",
    ]
    for verdict in sorted(verification.verdicts, key=lambda v: (str(v.varied), v.strategy)):
        model = str(verdict.varied.get("workload.model", ""))
        word = {True: "yes", False: "no", None: "not tried"}[verdict.equivalent]
        worst = "" if verdict.worst is None else f"{verdict.worst:.2g}"
        cells = (model, verdict.strategy, str(verdict.world_size), word, worst)
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def picture(rows: Sequence[dict[str, Any]]) -> str:
    """SVG of throughput over peak memory; the front is that of verified rows if there are any."""
    rows = [row for row in rows if row["metrics"].get(RATE) and row["metrics"].get(PEAK)]
    unit, size = byte_unit(max(row["metrics"][PEAK]["value"] for row in rows))
    by_strategy: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_strategy.setdefault(row["strategy"], []).append(row)
    verified = [row for row in rows if row["equivalent"]] or rows
    points = [
        (row["metrics"][PEAK]["value"] / size, row["metrics"][RATE]["value"]) for row in verified
    ]
    series = [
        marks(strategy, members, size, style=number)
        for number, (strategy, members) in enumerate(by_strategy.items())
    ]
    panel = trade_off_panel("", series, points, unit)
    (drawing,) = draw(figure("throughput-memory", "Speed against memory", [panel]))
    return figure_svg(drawing)


def marks(strategy: str, rows: Sequence[dict[str, Any]], size: float, *, style: int) -> Series:
    """One mark a row, named by its strategy, and by its ranks if there are several rows."""
    rates = [row["metrics"][RATE] for row in rows]
    names = [f"{strategy}, {row['world_size']}" if len(rows) > 1 else strategy for row in rows]
    return Series(
        name=strategy,
        style=style,
        x=[row["metrics"][PEAK]["value"] / size for row in rows],
        y=[rate["value"] for rate in rates],
        low=[rate["low"] for rate in rates],
        high=[rate["high"] for rate in rates],
        text=names,
        places=names,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("name")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the files")
    parser.add_argument("--picture", type=Path, help="SVG file of throughput over peak memory")
    options = parser.parse_args()
    run = load_run(options.run)
    environment = RunFolder(options.run).read_environment()
    comparison = compare([run], None)
    table = render_tables([comparison_table(comparison)], Format.MARKDOWN, headings=False).strip()
    place = surroundings_line(surroundings_in(environment))
    stem = f"{environment['date'][:10]}-{options.name}"
    verdicts = "\n".join(verdict_lines(run.verification))
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"{stem}.md").write_text(
        f"# {options.name}\n\n{place}\n\n{table}\n\n## Verification\n\n{verdicts}\n"
    )
    command = shlex.join(["python", "benchmarks/results_table.py", *sys.argv[1:]])
    content = {"place": place, "command": command, **comparison_json(comparison)}
    text = json.dumps(content, indent=1, default=str)
    (options.out / f"{stem}.json").write_text(text + "\n")
    if run.verification is not None:
        verification = run.verification.model_dump_json(indent=1)
        (options.out / f"{stem}-verification.json").write_text(verification + "\n")
    if options.picture is not None:
        svg = picture(json.loads(text)["rows"])
        if len(svg.encode()) > MOST_PICTURE_BYTES:
            raise SystemExit(f"{len(svg)} bytes: too large for a README")
        options.picture.write_text(svg)


if __name__ == "__main__":
    main()
