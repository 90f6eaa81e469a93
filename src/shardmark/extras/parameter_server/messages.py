"""Messages between workers and parameter servers: a header, then flat buckets of parameters.

All by point-to-point operations of the process group, with tensors on the CPU.
"""

from __future__ import annotations

import math
import pickle
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardmark.base.errors import ShardmarkError
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


HEADER, CONTENT = 1, 2
"""Tags, so that a header can be received while content is being sent."""
NOTHING_LEFT = -1
MAX_VALUE_BYTES = 2**30
"""Limit on a gathered value of one worker, and on all values together."""


@dataclass
class Counts:
    """Counters of a rank's messages.  Threads change different keys, or take turns."""

    pushes: int = 0
    pulls: int = 0
    updates: int = 0
    staleness: Counter[str] = field(default_factory=Counter)
    """Number of gradients by the updates between the pull of their parameters and their use."""
    sent_bytes: Counter[str] = field(default_factory=Counter)
    """Bytes by number of the other rank."""
    received_bytes: Counter[str] = field(default_factory=Counter)

    def as_json(self) -> dict[str, Any]:
        return {name: v if isinstance(v, int) else dict(v) for name, v in vars(self).items()}


class PeerGone(RuntimeError):  # noqa: N818  (what happened, not an error of ours)
    """The other process has died, or closed its connection."""

    def __init__(self, rank: int) -> None:
        super().__init__(f"rank {rank} is gone")
        self.rank = rank


class Kind(IntEnum):
    """Request of a worker to a server."""

    PUSH = 1
    """Gradients of one step follow, bucket by bucket."""
    PULL = 2
    """Asks for the parameters, once the bound allows the worker's next step."""
    GRADIENTS = 3
    """Asks for the averaged gradient of the current step in fp32, before the update."""
    PARAMETERS = 4
    """Asks for the current parameters in fp32."""
    STATE = 5
    """Asks for the optimizer's state: for each key a tensor of every bucket."""
    STEP_SHARD = 6
    """Asks for a share of a step before `number`."""
    GATHER = 7
    """Waits for all other workers; `number` bytes follow, and all values are returned."""
    CLOSE = 8
    """Ends the connection: no other request follows."""


@dataclass(frozen=True, slots=True)
class Header:
    kind: Kind
    number: int = 0
    rate: float = 0.0
    """Learning rate of a push."""


@contextmanager
def _talking_to(rank: int) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise PeerGone(rank) from error


def send(tensor: Tensor, to: int, tag: int = CONTENT) -> None:
    with _talking_to(to):
        dist.send(tensor, to, tag=tag)


def receive(tensor: Tensor, source: int, tag: int = CONTENT) -> None:
    with _talking_to(source):
        dist.recv(tensor, source, tag=tag)


class Sending:
    """A tensor that is being sent; it must not change until `wait` returns."""

    def __init__(self, tensor: Tensor, to: int) -> None:
        self._to = to
        with _talking_to(to):
            self._work = dist.isend(tensor, to, tag=CONTENT)

    def wait(self) -> None:
        assert self._work is not None, "this process is in the group"
        with _talking_to(self._to):
            self._work.wait()


def send_header(to: int, kind: Kind, number: int = 0, rate: float = 0.0) -> None:
    send(torch.tensor([kind, number, rate], dtype=torch.float64), to, HEADER)


def receive_header(source: int) -> Header:
    """Receive a header.  Raises `ShardmarkError` for an invalid one."""
    packed = torch.empty(3, dtype=torch.float64)
    receive(packed, source, HEADER)
    kind, number, rate = packed.tolist()
    counts = number.is_integer() and number >= 0
    if kind not in [*Kind] or not counts or not 0 <= rate < math.inf:
        raise _not_understood(source, f"header {kind:g}, {number:g}, {rate:g}")
    return Header(Kind(int(kind)), int(number), rate)


def send_numbers(numbers: list[int], to: int) -> None:
    send(torch.tensor(numbers, dtype=torch.int64), to)


def receive_numbers(count: int, source: int) -> list[int]:
    numbers = torch.empty(count, dtype=torch.int64)
    receive(numbers, source)
    return [int(number) for number in numbers.tolist()]


def receive_step_shard(source: int, end_step: int, workers: int) -> tuple[int, int] | None:
    """Receive the step, before `end_step`, and share from a server; None if none is left."""
    step, share = receive_numbers(2, source)
    if step == NOTHING_LEFT:
        return None
    if not (0 <= step < end_step and 0 <= share < workers):
        raise _not_understood(source, f"share {share} of step {step}")
    return step, share


def to_bytes(value: object) -> Tensor:
    """Pickle a value into a uint8 tensor of shape (n,)."""
    content = pickle.dumps(value)
    if len(content) > MAX_VALUE_BYTES:
        raise ShardmarkError(
            f"a worker's value has {len(content):,} bytes;"
            f" at most {MAX_VALUE_BYTES:,} can be gathered"
        )
    return torch.from_numpy(np.frombuffer(content, dtype=np.uint8).copy())


def receive_value(size_bytes: int, source: int) -> object:
    """Receive a value that another process of this trial pickled by `to_bytes`."""
    if not 0 < size_bytes <= MAX_VALUE_BYTES:
        raise _not_understood(source, f"a value of {size_bytes:,} bytes")
    content = torch.empty(size_bytes, dtype=torch.uint8)
    receive(content, source)
    try:
        return pickle.loads(content.numpy().tobytes())
    except Exception as error:
        raise _not_understood(source, f"a value ({type(error).__name__})") from error


def _not_understood(source: int, content: str) -> ShardmarkError:
    return ShardmarkError(f"rank {source} sent what no rank of this trial sends: {content}")
