"""A server, its workers' voices, and the model that all began with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shardmark.strategies.parameter_server.buckets import Partition, partition_parameters
from shardmark.strategies.parameter_server.server import GradientServer
from tests.unit.strategies.network import Client, Network, Served
from tests.unit.training.toy import plain, recipe

if TYPE_CHECKING:
    import pytest

COUNTS: dict[str, Any] = {"optimizer": {"name": "sgd", "lr": 1.0}}
"""With gradients of -1, a parameter that began at zero counts the updates."""


class Scene:
    """A server, its workers, and the model that all began with."""

    def __init__(self, patch: pytest.MonkeyPatch, workers: int, wire: str = "fp32") -> None:
        self.network = Network(server=workers).installed(patch)
        self.model = plain()
        self.partition: Partition = partition_parameters(
            self.model, servers=1, bucket_bytes=100, wire=wire
        )
        self.buckets = self.partition[0]
        self.clients = [Client(self.network, rank, self.buckets) for rank in range(workers)]

    @contextmanager
    def served(self, bound: int | None, **changes: Any) -> Iterator[Served]:
        server = GradientServer(
            self.model,
            self.buckets,
            recipe=recipe(**changes),
            workers=len(self.clients),
            bound=bound,
            norm_group=None,
        )
        with Served(server, self.network, len(self.clients)) as served:
            yield served

    def drawn(self, generator: torch.Generator) -> list[Tensor]:
        return [torch.randn(b.elements, generator=generator) for b in self.buckets]

    def constant(self, value: float) -> list[Tensor]:
        return [torch.full((b.elements,), value, dtype=b.wire_type) for b in self.buckets]

    def by_name(self, flats: list[Tensor]) -> dict[str, Tensor]:
        pairs = zip(self.buckets, flats, strict=True)
        return {segment.name: segment.of(flat) for b, flat in pairs for segment in b.segments}

    def meet(self) -> None:
        """As at the training's end: what is counted is settled."""
        for client in self.clients:
            client.come()
        for client in self.clients:
            client.met()
