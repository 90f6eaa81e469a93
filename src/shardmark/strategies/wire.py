"""Formulas of traffic that several strategies share.  Imports no torch."""

from __future__ import annotations

from shardmark.core.wire import ModelSize, Traffic, WireBytes

FP32_BYTES = 4
PRECISION_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}

SILENT = WireBytes(traffic=(), formula="nothing")
"""Of a strategy of one process."""


def all_reduced(size: ModelSize, world_size: int) -> WireBytes:
    """Gradients averaged in fp32 by an all-reduce."""
    payload = size.trained_parameters * FP32_BYTES
    return WireBytes(
        traffic=(Traffic(kind="all_reduce", payload_bytes=payload, ranks=world_size),),
        formula="all-reduce: 2 (n-1)/n G",
    )


def sharded_traffic(
    size: ModelSize, gathered_bytes: int, ranks: int, gathers: int
) -> tuple[Traffic, Traffic]:
    """Parameters gathered so often among so many ranks; gradients scattered once, in fp32.

    `gathered_bytes` is one parameter's.  Micro-batches before the last one keep their gradients,
    and gather like any other.
    """
    return (
        Traffic(
            kind="all_gather",
            payload_bytes=gathers * size.parameters * gathered_bytes / ranks,
            ranks=ranks,
        ),
        Traffic(
            kind="reduce_scatter",
            payload_bytes=size.trained_parameters * FP32_BYTES,
            ranks=ranks,
        ),
    )


def times(count: int) -> str:
    """A factor in front of a term of a formula; nothing for one."""
    return "" if count == 1 else f"{count} x "
