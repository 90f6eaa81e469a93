"""Makes a node and its card from measurements, and writes files that `plan --on` reads."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any

from scipy.optimize import isotonic_regression

from shardmark.base.files.strict_yaml import format_yaml
from shardmark.base.results.network import MeasuredOperation, NetworkRecord, Reach
from shardmark.predict.hardware.catalogue import Card, Node, NodeType, Timed
from shardmark.predict.timing import Constants

OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather", "point_to_point")
"""Operations whose fit describes a link; the first that has a fit counts."""


def write_node(
    path: Path, record: NetworkRecord, *, device: str, memory_gib: float, source: str
) -> Path:
    """Write the node's file and, beside it, the card's file; return the path of the latter.

    The record has fits and the ranks' speed.
    """
    beside = path.with_name(f"{path.stem}-card.yaml")
    measured = node_of(record, device=device, memory_gib=memory_gib, source=source)
    node = measured.node.model_copy(update={"card": beside.name, "source": source})
    for file, content in ((beside, measured.card), (path, node)):
        values = content.model_dump(mode="json", exclude_defaults=True)
        file.write_text(format_yaml(values), encoding="utf-8")
    return beside


def node_of(
    record: NetworkRecord, *, device: str, memory_gib: float = 1.0, source: str = "measured"
) -> NodeType:
    """Return the node that predictions need to reproduce the measurements.

    The record has fits and the ranks' speed.  Predictions use a fraction of each value of a data
    sheet, so each measured value is divided by that fraction.
    """
    constants, speed = Constants(), record.speed
    assert speed is not None, "it is measured where it is asked for"
    ordinary = speed.flops_per_second["fp32"]
    card: dict[str, Any] = {
        "device": device,
        "peaks": {
            name: flops / (constants.product_share if flops > ordinary else constants.core_share)
            for name, flops in speed.flops_per_second.items()
        },
        "memory_gib": memory_gib,
        "memory_bytes_per_second": speed.memory_bytes_per_second / constants.memory_share,
        "operation_seconds": speed.operation_seconds,
        "source": source,
        **_link("link", record, "same_host", constants.link_share),
    }
    node: dict[str, Any] = {
        "card": device,
        "devices": max(Counter(record.hosts).values()),
        "shared_speed": speed.shared,
        **_link("network", record, "between_hosts", constants.network_share),
    }
    return NodeType(card=Card(**card), node=Node(**node))


def _link(name: str, record: NetworkRecord, reach: Reach, share: float) -> dict[str, Any]:
    """Return the fields of a card or node about a link; empty if none was measured."""
    measured = [one for one in record.operations if one.reach == reach and one.fit is not None]
    fits = {one.operation: one.fit for one in measured}
    fit = next((fits[operation] for operation in OPERATIONS if operation in fits), None)
    if fit is None:
        return {}
    return {
        f"{name}_bytes_per_second": fit.bytes_per_second.value / share,
        f"{name}_latency_seconds": fit.latency_seconds.value,
        f"{name}_seconds": {one.operation: _timed(one) for one in measured},
    }


def _timed(measured: MeasuredOperation) -> Timed:
    """Return medians that do not fall with a larger payload."""
    sizes = [size for size in measured.sizes if size.seconds]
    rising = isotonic_regression([median(size.seconds) for size in sizes]).x
    seconds = {size.payload_bytes: float(value) for size, value in zip(sizes, rising, strict=True)}
    return Timed(ranks=len(measured.ranks), seconds=seconds)
