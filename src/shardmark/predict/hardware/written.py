"""A node and its card from measurements, and as files that `plan --on` reads."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any

from scipy.optimize import isotonic_regression

from shardmark.core.strict_yaml import format_yaml
from shardmark.predict.hardware.catalogue import Card, Node, NodeType, Timed
from shardmark.predict.timing import Constants
from shardmark.results.network import MeasuredOperation, NetworkRecord, Reach

OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather", "point_to_point")
"""Which stands for a link: the first that was bounded."""


def write_node(
    path: Path, record: NetworkRecord, *, device: str, memory_gib: float, source: str
) -> Path:
    """The node's file and, beside it, its card's, whose path is returned.

    The record has fits and the ranks' speed.
    """
    beside = path.with_name(f"{path.stem}-card.yaml")
    found = node_of(record, device=device, memory_gib=memory_gib, source=source)
    node = found.node.model_copy(update={"card": beside.name, "source": source})
    for file, content in ((beside, found.card), (path, node)):
        known = content.model_dump(mode="json", exclude_defaults=True)
        file.write_text(format_yaml(known), encoding="utf-8")
    return beside


def node_of(
    record: NetworkRecord, *, device: str, memory_gib: float = 1.0, source: str = "measured"
) -> NodeType:
    """What was measured as hardware; the record has fits and the ranks' speed.

    Predictions take a share of each figure, so that it holds what would have that share.
    """
    constants, speed = Constants(), record.speed
    assert speed is not None, "it is measured where it is asked for"
    ordinary = speed.flops_per_second["fp32"]
    card: dict[str, Any] = {
        "device": device,
        "peaks": {
            name: found / (constants.product_share if found > ordinary else constants.core_share)
            for name, found in speed.flops_per_second.items()
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
    """Bandwidth one way, latency and timings; nothing where none was measured."""
    fits = {
        each.operation: each.fit
        for each in record.operations
        if each.reach == reach and each.fit is not None
    }
    fit = next((fits[name] for name in OPERATIONS if name in fits), None)
    if fit is None:
        return {}
    return {
        f"{name}_bytes_per_second": fit.bytes_per_second.value / share,
        f"{name}_latency_seconds": fit.latency_seconds.value,
        f"{name}_seconds": {
            each.operation: _timed(each)
            for each in record.operations
            if each.reach == reach and each.fit is not None
        },
    }


def _timed(measured: MeasuredOperation) -> Timed:
    """Medians, of which none is shorter than that of a smaller payload."""
    sizes = [size for size in measured.sizes if size.seconds]
    rising = isotonic_regression([median(size.seconds) for size in sizes]).x
    seconds = {size.payload_bytes: float(each) for size, each in zip(sizes, rising, strict=True)}
    return Timed(ranks=len(measured.ranks), seconds=seconds)
