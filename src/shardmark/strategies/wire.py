"""What a strategy's definition has to send in a step.  Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import fsum

FP32_BYTES = 4
PRECISION_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """Elements of all parameters together."""

    parameters: int
    trained_parameters: int
    """Those that have gradients."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """One kind of collective in a step, as one training rank sees it."""

    kind: str
    """As in the probe's `collectives`."""
    payload_bytes: float
    """Bytes of the tensors that the rank hands in: its own part for a gather."""
    ranks: int
    """In the group."""

    @property
    def carried_bytes(self) -> float:
        """What the network has to carry for this rank."""
        share = carried_share(self.kind, self.ranks)
        assert share is not None, f"a strategy's formula names an unknown collective: {self.kind}"
        return share * self.payload_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class WireBytes:
    """What the definition needs the network to carry in a step, for each training rank.

    These are a step's gradients and parameters alone: no loss, no norm, no evaluation.
    """

    traffic: tuple[Traffic, ...]
    formula: str
    """In words of n ranks, P bytes of parameters and G bytes of gradients."""
    note: str | None = None
    """How the library that it is built on differs from the definition."""

    @property
    def carried_bytes(self) -> float:
        return fsum(one.carried_bytes for one in self.traffic)


_SHARES: Mapping[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: n - 1,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "broadcast": lambda n: (n - 1) / n,
    "reduce": lambda n: (n - 1) / n,
    "gather": lambda n: (n - 1) / n,
    "scatter": lambda n: (n - 1) / n,
    "send": lambda _: 1.0,
    "receive": lambda _: 1.0,
    "barrier": lambda _: 0.0,
}


def carried_share(kind: str, ranks: int) -> float | None:
    """Bytes that must be carried for a rank, of each byte that it hands in; None if unknown.

    No algorithm undercuts them, and rings reach them; with one root, it is the mean over the ranks.
    A message counts where it is sent, and one from a parameter server for the worker that gets it.
    Source: Patarasuk and Yuan, J. Parallel Distrib. Comput. 69 (2009), 117-124; Thakur and others,
    Int. J. High Performance Computing Applications 19 (2005), 49-66.
    """
    share = _SHARES.get(kind)
    return None if share is None else share(ranks)


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
