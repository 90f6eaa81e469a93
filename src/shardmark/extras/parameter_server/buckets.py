"""Assignment of parameters to servers, and the flat buckets in which they are sent."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shardmark.ranks.workloads.base import ParameterGroup

WIRE_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
ALIGNED_ELEMENTS = 16
"""Alignment of parameters in a bucket: 64 bytes of fp32, a cache line, and more than the 16 bytes
that vectorised kernels and cuBLAS require."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Part of a flat bucket that a parameter occupies."""

    name: str
    shape: torch.Size
    start: int
    end: int

    def view(self, flat: Tensor) -> Tensor:
        """View of the bucket with the parameter's shape."""
        return flat[self.start : self.end].view(self.shape)


@dataclass(frozen=True, slots=True)
class Bucket:
    """Parameters that are sent in one message."""

    segments: tuple[Segment, ...]
    wire_type: torch.dtype

    @property
    def elements(self) -> int:
        return self.segments[-1].end

    @property
    def wire_bytes(self) -> int:
        return self.elements * self.wire_type.itemsize

    def flat(self, named: Mapping[str, Tensor]) -> Tensor:
        """Copy the parameters into one tensor, with zeros between them."""
        first = named[self.segments[0].name]
        flat = torch.zeros(self.elements, dtype=first.dtype, device=first.device)
        for segment in self.segments:
            segment.view(flat).copy_(named[segment.name].detach())
        return flat

    def by_name(self, flat: Tensor) -> dict[str, Tensor]:
        """Copy each parameter's part of the flat tensor."""
        return {segment.name: segment.view(flat).clone() for segment in self.segments}

    def travels_as(self, flat: Tensor) -> bool:
        """True if the flat tensor itself can be sent and received."""
        return flat.device.type == "cpu" and flat.dtype == self.wire_type

    def message_buffer(self, device: torch.device) -> Tensor:
        """Return a CPU tensor for messages, pinned if the device is a GPU."""
        pinned = device.type == "cuda"
        return torch.empty(self.elements, dtype=self.wire_type, pin_memory=pinned)


Partition = tuple[tuple[Bucket, ...], ...]
"""The buckets of each server."""


def partition_parameters(
    model: nn.Module,
    *,
    servers: int,
    bucket_bytes: int,
    wire: str,
    groups: Sequence[ParameterGroup] = (),
) -> Partition:
    """Assign parameters to servers and buckets, equally on every rank.

    The largest parameter goes to the server that has least so far; a server's parameters are
    bucketed in reverse order of registration, which is about the order of their gradients, and
    group by group: the optimizer treats a bucket as one parameter.
    """
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    elements = [0] * servers
    server_of = {}
    for name, parameter in sorted(named, key=lambda pair: -pair[1].numel()):
        least = elements.index(min(elements))
        server_of[name] = least
        elements[least] += parameter.numel()
    together = [group.names for group in groups] or [frozenset(server_of)]

    def buckets_of(server: int, names: frozenset[str]) -> Iterator[Bucket]:
        assigned = [(n, p) for n, p in reversed(named) if n in names and server_of[n] == server]
        return _buckets(assigned, bucket_bytes, wire)

    return tuple(
        tuple(bucket for names in together for bucket in buckets_of(server, names))
        for server in range(servers)
    )


def _buckets(
    named: list[tuple[str, nn.Parameter]], bucket_bytes: int, wire: str
) -> Iterator[Bucket]:
    segments: list[Segment] = []
    end = 0
    for name, parameter in named:
        start = -(-end // ALIGNED_ELEMENTS) * ALIGNED_ELEMENTS
        if segments and (start + parameter.numel()) * 4 > bucket_bytes:
            yield Bucket(tuple(segments), WIRE_TYPES[wire])
            segments, start = [], 0
        segments.append(Segment(name, parameter.shape, start, start + parameter.numel()))
        end = start + parameter.numel()
    if segments:
        yield Bucket(tuple(segments), WIRE_TYPES[wire])
