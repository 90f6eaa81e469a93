"""The messages of one parameter server and its workers by queues in one process."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from queue import Queue
from typing import TYPE_CHECKING, Any

import torch

from shardmark.extras.parameter_server import messages as _messages
from shardmark.extras.parameter_server.messages import (
    HEADER,
    Bucket,
    Kind,
    Partition,
    partition_parameters,
    receive,
    receive_numbers,
    receive_value,
    send,
    send_header,
    to_bytes,
)
from shardmark.extras.parameter_server.server import GradientServer
from tests.unit.ranks.train.toy import plain, recipe

if TYPE_CHECKING:
    import pytest
    from torch import Tensor

PATIENCE_SECONDS = 20.0


class Sent:
    """Left at once."""

    def wait(self) -> None:
        return None


class Network:
    """A stand-in for `torch.distributed`: threads are the server's unless they say otherwise."""

    def __init__(self, server: int) -> None:
        self.server = server
        self._me = threading.local()
        self._lock = threading.Lock()
        self._queues: dict[tuple[int, int, int], Queue[Tensor | None]] = {}
        self.dead: dict[int, threading.Event] = {}
        """Ranks to which a send never ends, as gloo's does not, until the event is set."""
        self.log: list[tuple[int, int, int, Tensor]] = []
        """Sender, receiver, tag, content of everything."""

    @contextmanager
    def being(self, rank: int) -> Iterator[None]:
        self._me.rank = rank
        yield
        del self._me.rank

    @property
    def me(self) -> int:
        return getattr(self._me, "rank", self.server)

    def _queue(self, source: int, to: int, tag: int) -> Queue[Tensor | None]:
        with self._lock:
            return self._queues.setdefault((source, to, tag), Queue())

    def send(self, tensor: Tensor, to: int, tag: int) -> None:
        self.log.append((self.me, to, tag, tensor.clone()))
        self._queue(self.me, to, tag).put(tensor.clone())
        if to in self.dead:
            self.dead[to].wait()

    def isend(self, tensor: Tensor, to: int, tag: int) -> Sent:
        self.send(tensor, to, tag)
        return Sent()

    def recv(self, tensor: Tensor, source: int, tag: int) -> None:
        queue = self._queue(source, self.me, tag)
        found = queue.get(timeout=PATIENCE_SECONDS)
        if found is None:
            queue.put(None)
            raise RuntimeError("connection closed by peer")
        assert (found.shape, found.dtype) == (tensor.shape, tensor.dtype)
        tensor.copy_(found)

    def dies(self, rank: int) -> None:
        """Whatever it sent arrives; then its connection is closed."""
        for tag in (_messages.HEADER, _messages.CONTENT):
            self._queue(rank, self.server, tag).put(None)

    def installed(self, patch: pytest.MonkeyPatch) -> Network:
        patch.setattr(_messages, "dist", self)
        return self

    def kinds(self, sender: int) -> list[Kind]:
        """Kinds of the headers that it sent."""
        return [Kind(int(t[0])) for who, _, tag, t in self.log if who == sender and tag == HEADER]


class Client:
    """Says what a worker says, without a model."""

    def __init__(self, network: Network, rank: int, buckets: Sequence[Bucket]) -> None:
        self._network, self._rank, self._buckets = network, rank, buckets

    def _ask(self, kind: Kind, number: int = 0, rate: float = 0.0) -> None:
        with self._network.being(self._rank):
            send_header(self._network.server, kind, number, rate)

    def _flats(self, dtype: torch.dtype | None = None) -> list[Tensor]:
        flats = [torch.empty(b.elements, dtype=dtype or b.wire_type) for b in self._buckets]
        with self._network.being(self._rank):
            for flat in flats:
                receive(flat, self._network.server)
        return flats

    def push(self, *flats: Tensor, rate: float = 1.0) -> None:
        self._ask(Kind.PUSH, rate=rate)
        with self._network.being(self._rank):
            for flat in flats:
                send(flat, self._network.server)

    def ask_for_parameters(self) -> None:
        self._ask(Kind.PULL)

    def pulled(self) -> list[Tensor]:
        return self._flats()

    def pull(self) -> list[Tensor]:
        self.ask_for_parameters()
        return self.pulled()

    def asked(self, kind: Kind) -> list[Tensor]:
        """Parameters or gradients.  Everything said before has been heard."""
        self._ask(kind)
        return self._flats(torch.float32)

    def state(self, keys: int) -> list[list[Tensor]]:
        self._ask(Kind.STATE)
        return [self._flats(torch.float32) for _ in range(keys)]

    def step_shard(self, end_step: int) -> list[int]:
        self._ask(Kind.STEP_SHARD, end_step)
        with self._network.being(self._rank):
            return receive_numbers(2, self._network.server)

    def come(self, value: object = None) -> None:
        content = to_bytes(value)
        self._ask(Kind.GATHER, len(content))
        with self._network.being(self._rank):
            send(content, self._network.server)

    def met(self) -> object:
        with self._network.being(self._rank):
            (size_bytes,) = receive_numbers(1, self._network.server)
            return receive_value(size_bytes, self._network.server)

    def close(self) -> None:
        self._ask(Kind.CLOSE)


class Served:
    """A server that serves in a thread until the block ends."""

    def __init__(self, server: GradientServer, network: Network, workers: int) -> None:
        self.server, self._network, self._workers = server, network, workers
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._serve, name="serve", daemon=True)

    def _serve(self) -> None:
        try:
            self.server.serve()
        except Exception as error:
            self.error = error

    def __enter__(self) -> Served:
        self._thread.start()
        return self

    def end(self) -> None:
        """Wait for the server, which ends by itself."""
        self._thread.join(PATIENCE_SECONDS)
        assert not self._thread.is_alive(), "it serves for ever"

    def __exit__(self, *_: Any) -> None:
        for rank in range(self._workers):
            self._network.dies(rank)  # whoever has closed is not listened to any more
        self.end()
        for end in self._network.dead.values():
            end.set()
        for thread in threading.enumerate():
            if thread.name.startswith("attend-"):
                thread.join(PATIENCE_SECONDS)


COUNTS: dict[str, Any] = {"optimizer": {"name": "sgd", "lr": 1.0}}
"""A recipe by which a parameter that began at zero counts updates, with gradients of -1."""


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

    def meet(self) -> None:
        """Exchange the counts as at the training's end."""
        for client in self.clients:
            client.come()
        for client in self.clients:
            client.met()
