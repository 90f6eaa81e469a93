"""Which server holds which parameters, and in which flat buckets they travel."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

WIRE_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Place:
    """One parameter's part of a flat bucket."""

    name: str
    shape: torch.Size
    start: int
    end: int

    def of(self, flat: Tensor) -> Tensor:
        """Its view of the bucket."""
        return flat[self.start : self.end].view(self.shape)


@dataclass(frozen=True, slots=True)
class Bucket:
    """Parameters that travel in one message."""

    places: tuple[Place, ...]
    wire_type: torch.dtype

    @property
    def elements(self) -> int:
        return self.places[-1].end

    @property
    def wire_bytes(self) -> int:
        return self.elements * self.wire_type.itemsize


Layout = tuple[tuple[Bucket, ...], ...]
"""By server."""


def layout_of(model: nn.Module, *, servers: int, bucket_bytes: int, wire: str) -> Layout:
    """The same on every rank.

    The largest parameter goes to the server that has least so far; a server's parameters are
    bucketed in reverse order of registration, which is about the order of their gradients.
    """
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    held = [0] * servers
    server_of = {}
    for name, parameter in sorted(named, key=lambda pair: -pair[1].numel()):
        least = held.index(min(held))
        server_of[name] = least
        held[least] += parameter.numel()
    return tuple(
        tuple(
            _buckets(
                [(n, p) for n, p in reversed(named) if server_of[n] == server], bucket_bytes, wire
            )
        )
        for server in range(servers)
    )


def _buckets(
    named: list[tuple[str, nn.Parameter]], bucket_bytes: int, wire: str
) -> Iterator[Bucket]:
    places: list[Place] = []
    end = 0
    for name, parameter in named:
        if places and (end + parameter.numel()) * 4 > bucket_bytes:
            yield Bucket(tuple(places), WIRE_TYPES[wire])
            places, end = [], 0
        places.append(Place(name, parameter.shape, end, end + parameter.numel()))
        end += parameter.numel()
    if places:
        yield Bucket(tuple(places), WIRE_TYPES[wire])
