"""What links between ranks can do, as a table."""

from __future__ import annotations

from collections.abc import Callable

from shardmark.analysis.network.links import COSTS
from shardmark.report.table.sections import Section
from shardmark.report.table.sections import TextColumn as Column
from shardmark.report.table.sections import TextTable as Table
from shardmark.report.table.table import NOTHING, number
from shardmark.results.network import Bounds, LinkFit, MeasuredOperation, NetworkRecord

MICROSECONDS, MEGABYTES = 1e6, 1e-6
WIDEST_FACTOR = 4.0
"""Between the ends of a bandwidth's interval; beyond it, the bandwidth is not known."""
REACHES = {"same_host": "one host", "between_hosts": "between hosts"}


def links_section(record: NetworkRecord) -> Section:
    """One line for each operation: latency and bandwidth with their intervals."""
    operations = record.operations
    columns = (
        Column(
            title="operation",
            cells=tuple(one.operation.replace("_", " ") for one in operations),
            numeric=False,
        ),
        Column(title="reach", cells=tuple(REACHES[one.reach] for one in operations), numeric=False),
        Column(title="ranks", cells=tuple(str(len(one.ranks)) for one in operations)),
        _fitted(operations, "latency\nus", lambda fit: fit.latency_seconds, MICROSECONDS),
        _fitted(operations, "bandwidth\nMB/s", lambda fit: fit.bytes_per_second, MEGABYTES),
        Column(title="scatter\n%", cells=tuple(_scatter(one) for one in operations)),
        Column(title="largest\nMB", cells=tuple(_largest(one) for one in operations)),
        Column(
            title="model, seconds",
            cells=tuple(COSTS[one.operation].model for one in operations),
            numeric=False,
        ),
    )
    return Section(
        title=f"Links between {record.world_size} ranks, {record.backend}",
        table=Table(columns=columns, notes=tuple(_notes(record))),
    )


def _fitted(
    operations: tuple[MeasuredOperation, ...],
    title: str,
    of: Callable[[LinkFit], Bounds],
    scale: float,
) -> Column:
    return Column(
        title=title,
        cells=tuple(
            NOTHING if one.fit is None else _bounds(of(one.fit), scale) for one in operations
        ),
    )


def _bounds(found: Bounds, scale: float) -> str:
    value = number(found.value * scale)
    if found.low is None or found.high is None:
        return f"{value} (no bounds)"
    return f"{value} ({number(found.low * scale)} to {number(found.high * scale)})"


def _scatter(one: MeasuredOperation) -> str:
    return NOTHING if one.fit is None else f"{100 * one.fit.residual:.0f}"


def _largest(one: MeasuredOperation) -> str:
    largest = max((size.payload_bytes for size in one.sizes), default=0)
    return number(largest * MEGABYTES, decimals=2)


def _notes(record: NetworkRecord) -> list[str]:
    hosts = list(dict.fromkeys(record.hosts))
    interface = "" if record.interface is None else f" over {record.interface}"
    notes = [
        f"{record.backend}{interface} on {len(hosts)} host{'s' if len(hosts) > 1 else ''}"
        f" ({', '.join(hosts)}), torch {record.torch}.",
        "a: latency of one message; b: bandwidth of one rank's link, one way; m: payload; n: ranks."
        " In brackets the 95 % interval, which contains what the model does not explain; scatter is"
        " what it leaves of a size's median.",
    ]
    if record.backend == "gloo" and any(
        one.operation == "reduce_scatter" for one in record.operations
    ):
        notes.append(
            "gloo's reduce-scatter is an all-reduce: its bandwidth here is half of the link's."
        )
    notes += [
        f"No fit of {one.operation} ({REACHES[one.reach]}): {one.reason}."
        for one in record.operations
        if one.reason is not None
    ]
    noisy = [
        f"{one.operation.replace('_', ' ')} ({REACHES[one.reach]})"
        for one in record.operations
        if one.fit is not None and _too_wide(one.fit.bytes_per_second)
    ]
    if noisy:
        notes.append(
            f"Bandwidth too noisy: measure longer, on a machine at rest. Wider than a factor of"
            f" {WIDEST_FACTOR:g}: {', '.join(noisy)}."
        )
    return notes


def _too_wide(found: Bounds) -> bool:
    if found.low is None or found.high is None:
        return True
    return found.high > WIDEST_FACTOR * found.low
