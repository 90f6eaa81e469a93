"""What single collectives send over the wire, and how long they take, beside what they must."""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.cluster.bench import ROOT, Node, bench

from shardmark.core.errors import ShardmarkError

MEASURING_SECONDS = 600.0
MB = 1e6
ESSENTIAL: dict[str, Callable[[int], float]] = {
    "send, then receive": lambda _: 1.0,
    "receive, then send": lambda _: 1.0,
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather_into_tensor": lambda n: (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter_tensor": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all_single": lambda n: (n - 1) / n,
}
"""Share of the payload that each rank has to send: rings, which no algorithm undercuts.  Of a
broadcast it depends on the rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One call of an operation; bytes and seconds are means over the ranks.

    Seconds are the median of a few calls.
    """

    operation: str
    payload_bytes: int
    sent_bytes: float
    least_bytes: float
    seconds: float
    least_seconds: float | None
    """At the link's speed, both directions busy; None over unlimited links."""


def measure(*, nodes: int, payload_bytes: int, bits_per_second: float | None) -> list[Line]:
    """Each operation among one rank a node, over links of that speed."""
    with (
        tempfile.TemporaryDirectory() as folder,
        bench(nodes=nodes, bits_per_second=bits_per_second) as built,
    ):
        out = Path(folder) / "found.json"

        def words(_: Node) -> list[str]:
            module = "benchmarks.cluster.collective_ranks"
            return [sys.executable, "-m", module, str(out), str(payload_bytes)]

        codes = built.run_everywhere(
            words,
            seconds=MEASURING_SECONDS,
            environment={"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])},
            logs=Path(folder),
        )
        if any(codes) or not out.exists():
            log = (Path(folder) / "node0.log").read_text()
            raise ShardmarkError(f"the ranks ended with {codes}: {log[-2000:]}")
        found = json.loads(out.read_text())
    return [
        _line(operation, found, nodes, bits_per_second)
        for operation in found["ranks"][0]
        if operation in ESSENTIAL
    ]


def _line(
    operation: str, found: dict[str, object], nodes: int, bits_per_second: float | None
) -> Line:
    payload_bytes, ranks = found["payload_bytes"], found["ranks"]
    assert isinstance(payload_bytes, int)
    assert isinstance(ranks, list)
    least_bytes = ESSENTIAL[operation](nodes) * payload_bytes
    return Line(
        operation=operation,
        payload_bytes=payload_bytes,
        sent_bytes=statistics.fmean(rank[operation]["sent_bytes"] for rank in ranks),
        least_bytes=least_bytes,
        seconds=statistics.fmean(rank[operation]["seconds"] for rank in ranks),
        least_seconds=None if bits_per_second is None else 8 * least_bytes / bits_per_second,
    )


def table(lines: list[Line]) -> str:
    """Markdown, which reads well in a terminal, too."""
    rows = [("operation", "MB sent", "must", "factor", "ms", "must", "factor")]
    for line in lines:
        least = line.least_seconds
        rows.append(
            (
                line.operation,
                f"{line.sent_bytes / MB:.2f}",
                f"{line.least_bytes / MB:.2f}",
                f"{line.sent_bytes / line.least_bytes:.2f}",
                f"{line.seconds * 1000:.1f}",
                "-" if least is None else f"{least * 1000:.1f}",
                "-" if least is None else f"{line.seconds / least:.2f}",
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    rule = "|".join("-" * (width + 2) for width in widths)
    text = [
        "| " + " | ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) + " |"
        for row in rows
    ]
    return "\n".join([text[0], f"|{rule}|", *text[1:]])
