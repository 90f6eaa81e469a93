"""Sends gradients to their servers, bucket by bucket, as the backward pass completes them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from shardmark.strategies.parameter_server.messages import Kind, Sending, send_header
from shardmark.strategies.parameter_server.parameter_layout import Bucket, Layout


@dataclass(slots=True)
class Queue:
    """What goes to one server in one step, in a fixed order."""

    server: int
    buckets: tuple[Bucket, ...]
    gradients: list[Tensor]
    """Flat, fp32, on the worker's device; the parameters' gradients are views of them."""
    outboxes: list[Tensor]
    """On the CPU, in the precision of the wire; the gradients themselves where they are that."""
    missing: list[int] = field(default_factory=list)
    """Gradients that each bucket still waits for."""
    next_bucket: int = 0


class Pushing:
    """Hooks into the backward pass; with `early` false everything is sent after it."""

    def __init__(
        self,
        model: nn.Module,
        layout: Layout,
        *,
        first_server: int,
        device: torch.device,
        early: bool,
    ) -> None:
        self._early = early
        self._device = device
        self._queues = [
            self._queue(first_server + index, buckets, device)
            for index, buckets in enumerate(layout)
        ]
        self._under_way: list[Sending] = []
        self._copies: list[tuple[Queue, int, torch.cuda.Event]] = []
        self._last = False
        self.rate = 0.0
        self.sent_bytes: Counter[str] = Counter()
        self.pushes = 0
        named = dict(model.named_parameters())
        for queue in self._queues:
            for index, bucket in enumerate(queue.buckets):
                for place in bucket.places:
                    parameter = named[place.name]
                    parameter.grad = place.of(queue.gradients[index])
                    parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                        partial(self._completed, queue, index)
                    )

    def _queue(self, server: int, buckets: tuple[Bucket, ...], device: torch.device) -> Queue:
        gradients = [torch.zeros(b.elements, device=device) for b in buckets]
        pinned = device.type == "cuda"
        outboxes = [
            flat
            if flat.device.type == "cpu" and b.wire_type == flat.dtype
            else torch.empty(b.elements, dtype=b.wire_type, pin_memory=pinned)
            for flat, b in zip(gradients, buckets, strict=True)
        ]
        return Queue(server, buckets, gradients, outboxes)

    @property
    def gradients(self) -> list[Tensor]:
        """All flat gradients."""
        return [flat for queue in self._queues for flat in queue.gradients]

    def begin(self, rate: float) -> None:
        """A step begins: gradients are zero, nothing has been sent."""
        self.rate = rate
        for queue in self._queues:
            queue.missing = [len(bucket.places) for bucket in queue.buckets]
            queue.next_bucket = 0
        for flat in self.gradients:
            flat.zero_()

    def last_pass(self, last: bool) -> None:
        """Whether the backward pass to come completes the step's gradients."""
        self._last = last

    def _completed(self, queue: Queue, index: int, parameter: Tensor) -> None:  # noqa: ARG002
        if not self._last:
            return
        queue.missing[index] -= 1
        if self._early:
            self._send_ready(queue)

    def _send_ready(self, queue: Queue) -> None:
        while queue.next_bucket < len(queue.buckets) and not queue.missing[queue.next_bucket]:
            self._launch(queue, queue.next_bucket)
            queue.next_bucket += 1

    def _launch(self, queue: Queue, index: int) -> None:
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

    def _post(self, queue: Queue, index: int) -> None:
        if index == 0:
            send_header(queue.server, Kind.PUSH, rate=self.rate)
        outbox = queue.outboxes[index]
        self._under_way.append(Sending(outbox, queue.server))
        self.sent_bytes[str(queue.server)] += outbox.nbytes

    def end(self) -> None:
        """Send what the backward pass left (unused parameters' zeros), and wait for all of it."""
        for queue in self._queues:
            queue.missing = [0] * len(queue.buckets)
            self._send_ready(queue)
        self._send_copied(wait=True)
        for sending in self._under_way:
            sending.wait()
        self._under_way.clear()
        self.pushes += 1
