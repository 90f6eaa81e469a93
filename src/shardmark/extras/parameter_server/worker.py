"""A worker of parameter servers: it computes gradients, and holds no optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial

import torch
from torch import Tensor, nn

from shardmark.base.errors import ShardmarkError
from shardmark.base.layout import Shard, StepShard
from shardmark.base.results.schema import ExchangeRecord
from shardmark.extras.parameter_server.messages import (
    Bucket,
    Counts,
    Kind,
    Partition,
    PeerGone,
    Sending,
    receive,
    receive_numbers,
    receive_step_shard,
    receive_value,
    send,
    send_header,
    to_bytes,
)
from shardmark.ranks.measure.step.recorder import Spans
from shardmark.ranks.strategies.base import HeldState, TrainingGroup
from shardmark.ranks.strategies.casting import lossless_copy
from shardmark.ranks.strategies.step import StepWorker, scale, state_keys
from shardmark.ranks.workloads.base import Batch


@contextmanager
def talking_to_servers() -> Iterator[None]:
    """Turn the loss of a server into an error that names it.  Every exchange is within it."""
    try:
        yield
    except PeerGone as gone:
        reason = f"the parameter server, rank {gone.rank}, is gone; see log.txt"
        raise ShardmarkError(reason) from gone


class WorkerGroup(TrainingGroup):
    """Workers wait for each other at the servers."""

    def __init__(self, servers: Sequence[int]) -> None:
        self._servers = servers

    def barrier(self) -> None:
        """Wait at every server until all workers have come."""
        for server in self._servers:
            self._gather(server, None)

    def gather(self, value: object) -> list[object]:
        """Return the value of every worker, in order of rank."""
        return self._gather(self._servers[0], value)

    def _gather(self, server: int, value: object) -> list[object]:
        with talking_to_servers():
            content = to_bytes(value)
            send_header(server, Kind.GATHER, len(content))
            send(content, server)
            (size_bytes,) = receive_numbers(1, server)
            values = receive_value(size_bytes, server)
        if not isinstance(values, list):
            raise ShardmarkError(f"the parameter server, rank {server}, gave no list of values")
        return values


@dataclass(slots=True)
class ServerQueue:
    """Buffers between a worker and a server, bucket by bucket in a fixed order."""

    server: int
    buckets: tuple[Bucket, ...]
    parameters: list[Tensor]
    """Flat fp32 tensors on the worker's device; the model's parameters are views of them."""
    inboxes: list[Tensor]
    """CPU tensors in the precision of messages; the parameters themselves if they suit."""
    gradients: list[Tensor]
    """Flat fp32 tensors on the worker's device; the model's gradients are views of them."""
    outboxes: list[Tensor]
    """CPU tensors of gradients in the precision of messages, like the inboxes."""
    missing: list[int] = field(default_factory=list)
    """Number of gradients that each bucket still waits for."""
    next_bucket: int = 0

    @classmethod
    def create(
        cls,
        server: int,
        buckets: tuple[Bucket, ...],
        named: Mapping[str, nn.Parameter],
        device: torch.device,
    ) -> ServerQueue:
        def boxes(flats: list[Tensor]) -> list[Tensor]:
            pairs = zip(flats, buckets, strict=True)
            return [flat if b.travels_as(flat) else b.message_buffer(device) for flat, b in pairs]

        parameters = [flattened(bucket, named) for bucket in buckets]
        gradients = [torch.zeros(bucket.elements, device=device) for bucket in buckets]
        return cls(server, buckets, parameters, boxes(parameters), gradients, boxes(gradients))


class GradientSender:
    """Sends gradients bucket by bucket, as the backward pass completes them.

    With `early` false everything is sent after the backward pass.
    """

    def __init__(
        self,
        model: nn.Module,
        partition: Partition,
        *,
        first_server: int,
        device: torch.device,
        early: bool,
    ) -> None:
        self._early = early
        self._device = device
        named = dict(model.named_parameters())
        self.queues = [
            ServerQueue.create(server, buckets, named, device)
            for server, buckets in enumerate(partition, start=first_server)
        ]
        self._under_way: list[Sending] = []
        self._copies: list[tuple[ServerQueue, int, torch.cuda.Event]] = []
        self._last = True
        self.rate = 0.0
        self.counts = Counts()
        for queue in self.queues:
            for index, bucket in enumerate(queue.buckets):
                for segment in bucket.segments:
                    parameter = named[segment.name]
                    parameter.grad = segment.view(queue.gradients[index])
                    parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                        partial(self._completed, queue, index)
                    )

    @property
    def gradients(self) -> list[Tensor]:
        """Flat gradients of all servers."""
        return [flat for queue in self.queues for flat in queue.gradients]

    def begin(self, rate: float) -> None:
        """Begin a step: set gradients to zero, and forget what was sent."""
        self.rate = rate
        for queue in self.queues:
            queue.missing = [len(bucket.segments) for bucket in queue.buckets]
            queue.next_bucket = 0
        for flat in self.gradients:
            flat.zero_()

    def last_pass(self, last: bool) -> None:
        """Set if the next backward pass completes the gradients of the step."""
        self._last = last

    def _completed(self, queue: ServerQueue, index: int, parameter: Tensor) -> None:
        if not self._last:
            return
        queue.missing[index] -= 1
        if self._early:
            self._send_ready(queue)

    def _send_ready(self, queue: ServerQueue) -> None:
        while queue.next_bucket < len(queue.buckets) and not queue.missing[queue.next_bucket]:
            self._launch(queue, queue.next_bucket)
            queue.next_bucket += 1

    def _launch(self, queue: ServerQueue, index: int) -> None:
        gradient, outbox = queue.gradients[index], queue.outboxes[index]
        if self._device.type == "cuda":
            outbox.copy_(gradient, non_blocking=True)
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's
            copied.record()
            self._copies.append((queue, index, copied))
            self._send_copied(wait=False)
            return
        if outbox is not gradient:
            outbox.copy_(gradient)
        self._post(queue, index)

    def _send_copied(self, *, wait: bool) -> None:
        """Send what has reached the host, in order; the copy is not waited for in a backward."""
        while self._copies:
            queue, index, copied = self._copies[0]
            if wait:
                copied.synchronize()
            elif not copied.query():  # type: ignore[no-untyped-call]  # torch's
                return
            self._post(queue, index)
            self._copies.pop(0)

    def _post(self, queue: ServerQueue, index: int) -> None:
        if index == 0:
            send_header(queue.server, Kind.PUSH, rate=self.rate)
        outbox = queue.outboxes[index]
        self._under_way.append(Sending(outbox, queue.server))
        self.counts.sent_bytes[str(queue.server)] += outbox.nbytes

    def end(self) -> None:
        """Send what the backward pass left (unused parameters' zeros), and wait for all of it."""
        for queue in self.queues:
            queue.missing = [0] * len(queue.buckets)
            self._send_ready(queue)
        self._send_copied(wait=True)
        for sending in self._under_way:
            sending.wait()
        self._under_way.clear()
        self.counts.pushes += 1


def flattened(bucket: Bucket, named: Mapping[str, nn.Parameter]) -> Tensor:
    """Copy the bucket's parameters into one tensor, of which they become views."""
    flat = bucket.flat(named)
    for segment in bucket.segments:
        named[segment.name].data = segment.view(flat)
    return flat


@dataclass(kw_only=True, eq=False)
class PushPullWorker(StepWorker):
    """Trains a copy of the parameters, and sends gradients as soon as they are ready."""

    partition: Partition
    bound: int | None
    """Staleness bound of the strategy: 0 waits for all workers in each step."""
    rate_factor: float = 1.0
    """Factor of the learning rate of a push."""

    def __post_init__(self) -> None:
        # A gradient that is clipped by itself can only leave when all of it is there.
        self._clipping = self.recipe.gradient_clipping if self.bound != 0 else None
        self._rate = self.recipe.optimizer.lr
        self._servers = range(self.shares, self.shares + len(self.partition))
        self._sender = GradientSender(
            self.module,
            self.partition,
            first_server=self.shares,
            device=self.device,
            early=self._clipping is None,
        )
        self._counts = self._sender.counts
        self.synchronise = self._sender.last_pass
        self.accumulates_alone, self.weighs_alone = True, self.bound != 0
        super().__post_init__()

    def _scale_gradients(self, factor: Tensor) -> None:
        scale(self._sender.gradients, factor)

    @cached_property
    def group(self) -> TrainingGroup:
        return WorkerGroup(self._servers)

    def step(self, batch: Batch, recorder: Spans) -> Tensor:
        with talking_to_servers():
            self._sender.begin(self._rate * self.rate_factor)
            loss = self._forward_backward(batch, recorder)
            if self._clipping is not None:
                nn.utils.clip_grad_norm_(self.module.parameters(), self._clipping)
            self._sender.end()
            with recorder.span("optimizer"):
                self._update()
        return loss

    def _update(self) -> None:
        """Pull parameters; with a bound, the first server answers before others are asked."""
        one_by_one = self.bound not in (0, None)
        if not one_by_one:
            for server in self._servers:
                send_header(server, Kind.PULL)
        for queue in self._sender.queues:
            if one_by_one:
                send_header(queue.server, Kind.PULL)
            for inbox in queue.inboxes:
                receive(inbox, queue.server)
                self._counts.received_bytes[str(queue.server)] += inbox.nbytes
        for queue in self._sender.queues:
            for flat, inbox in zip(queue.parameters, queue.inboxes, strict=True):
                if inbox is not flat:
                    flat.copy_(inbox, non_blocking=True)
        self._counts.pulls += 1

    def set_learning_rate(self, learning_rate: float) -> None:
        self._rate = learning_rate

    def step_shards(self, end_step: int) -> Iterator[StepShard] | None:
        """None for synchronous workers; otherwise shares that the first server distributes."""
        return None if self.bound == 0 else self._handed_out(end_step)

    def _handed_out(self, end_step: int) -> Iterator[StepShard]:
        while True:
            with talking_to_servers():
                send_header(self._servers[0], Kind.STEP_SHARD, end_step)
                step_shard = receive_step_shard(self._servers[0], end_step, self.shares)
            if step_shard is None:
                return
            step, share = step_shard
            yield StepShard(step=step, shard=Shard(index=share, count=self.shares))

    def exchange(self) -> ExchangeRecord:
        return ExchangeRecord(**self._counts.as_json() | {"updates": None})

    @talking_to_servers()
    def close(self) -> None:
        for server in self._servers:
            send_header(server, Kind.CLOSE)

    def full_parameters(self) -> dict[str, Tensor]:
        """Parameters of the servers in fp32, and this rank's frozen ones."""
        trained = self._tensors(Kind.PARAMETERS)
        return {
            name: trained[name] if name in trained else lossless_copy(parameter)
            for name, parameter in self.module.named_parameters()
        }

    def full_gradients(self) -> dict[str, Tensor]:
        return self._tensors(Kind.GRADIENTS)

    def _tensors(self, kind: Kind) -> dict[str, Tensor]:
        return {name: t for _, named in self._asked(kind) for name, t in named.items()}

    def full_optimizer_state(self) -> dict[str, dict[str, Tensor]]:
        state: dict[str, dict[str, Tensor]] = {}
        for key, named in self._asked(Kind.STATE, state_keys(self.recipe.optimizer)):
            for name, tensor in named.items():
                state.setdefault(name, {})[key] = tensor
        return state

    @talking_to_servers()
    def _asked(
        self, kind: Kind, keys: Sequence[str] = ("",)
    ) -> list[tuple[str, dict[str, Tensor]]]:
        """Receive each server's fp32 tensors by parameter, for each key."""
        answers = []
        for queue in self._sender.queues:
            send_header(queue.server, kind)
            for key in keys:
                named: dict[str, Tensor] = {}
                for bucket in queue.buckets:
                    flat = torch.empty(bucket.elements)
                    receive(flat, queue.server)
                    named |= bucket.by_name(flat)
                answers.append((key, named))
        return answers

    def held_state(self) -> HeldState:
        return HeldState(
            parameters=tuple(self.module.parameters()),
            gradients=tuple(self._sender.gradients),
            optimizer_state=(),
        )
