"""Writes a node and its card from measurements, in the form that `plan --on` reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardmark.core.strict_yaml import format_yaml
from shardmark.predict.timing import Constants
from shardmark.results.network import NetworkRecord, Reach

OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather", "point_to_point")
"""Whose bandwidth stands for a link: the first that was bounded."""


def write_node(
    path: Path,
    record: NetworkRecord,
    *,
    device: str,
    flops_per_second: Mapping[str, float],
    memory_bytes_per_second: float,
    memory_gib: float,
    source: str,
) -> Path:
    """The node's file and, beside it, its card's, whose path is returned.

    Predictions take a share of each figure, so that files hold what would have that share.
    """
    constants = Constants()
    ordinary = flops_per_second["fp32"]
    peaks = {
        name: found / (constants.product_share if found > ordinary else constants.core_share)
        for name, found in flops_per_second.items()
    }
    card: dict[str, Any] = {
        "device": device,
        "peaks": peaks,
        "memory_gib": memory_gib,
        "memory_bytes_per_second": memory_bytes_per_second / constants.memory_share,
    }
    if (link := _bandwidth(record, "same_host")) is not None:
        card["link_bytes_per_second"] = link / constants.link_share
    beside = path.with_name(f"{path.stem}-card.yaml")
    node: dict[str, Any] = {
        "card": beside.name,
        "devices": max(Counter(record.hosts).values()),
    }
    if (network := _bandwidth(record, "between_hosts")) is not None:
        node["network_bytes_per_second"] = network / constants.network_share
    for file, content in ((beside, card), (path, node)):
        file.write_text(format_yaml({**content, "source": source}), encoding="utf-8")
    return beside


def _bandwidth(record: NetworkRecord, reach: Reach) -> float | None:
    """One way; None where none was measured."""
    fits = {
        each.operation: each.fit.bytes_per_second.value
        for each in record.operations
        if each.reach == reach and each.fit is not None
    }
    return next((fits[name] for name in OPERATIONS if name in fits), None)
