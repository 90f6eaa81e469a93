"""A worker of parameter servers: it computes gradients, and holds no optimizer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from shardmark.core.recipe import Recipe
from shardmark.core.shares import Shard, StepShard
from shardmark.measure.step.recorder import Spans
from shardmark.results.schema import ExchangeRecord
from shardmark.strategies.base import CheckpointState, HeldState
from shardmark.strategies.checkpoint_state import copied_into
from shardmark.strategies.parameter_server.messages import (
    NOTHING_LEFT,
    Kind,
    PeerGone,
    receive,
    receive_numbers,
    say_farewell,
    send_header,
)
from shardmark.strategies.parameter_server.parameter_layout import Bucket, Layout
from shardmark.strategies.parameter_server.pushing import Pushing
from shardmark.strategies.parameter_server.worker_group import WorkerGroup, server_gone
from shardmark.strategies.step import autocast, state_keys
from shardmark.workloads.base import Batch, Workload


class PushPullWorker:
    """Forward and backward on a copy of the parameters, whose gradients leave as they are ready.

    `bound` is the strategy's: 0 waits for all workers in each step.
    """

    def __init__(
        self,
        model: nn.Module,
        layout: Layout,
        *,
        workload: Workload,
        recipe: Recipe,
        device: torch.device,
        workers: int,
        bound: int | None,
    ) -> None:
        self._model = model
        self._workload = workload
        self._recipe = recipe
        self._device = device
        self._workers = workers
        self._bound = bound
        self._servers = range(workers, workers + len(layout))
        self._layout = layout
        self._rate = recipe.optimizer.lr
        self.group = WorkerGroup(self._servers)
        named = dict(model.named_parameters())
        self._flat = [[_flattened(named, bucket) for bucket in part] for part in layout]
        self._inboxes = [
            [_inbox(flat, bucket) for flat, bucket in zip(flats, part, strict=True)]
            for flats, part in zip(self._flat, layout, strict=True)
        ]
        # A gradient that is clipped by itself can only leave when all of it is there.
        self._clipping = recipe.gradient_clipping if bound != 0 else None
        self._pushing = Pushing(
            model, layout, first_server=workers, device=device, early=self._clipping is None
        )
        self._pulls = 0
        self._received: Counter[str] = Counter()

    def step(self, batch: Batch, recorder: Spans) -> Tensor:
        try:
            return self._step(batch, recorder)
        except PeerGone as gone:
            raise server_gone(gone) from gone

    def _step(self, batch: Batch, recorder: Spans) -> Tensor:
        micro_batches = batch.split(self._recipe.gradient_accumulation)
        count = len(micro_batches)
        losses = []
        self._pushing.begin(self._rate)
        for index, micro_batch in enumerate(micro_batches):
            with recorder.span("forward"), autocast(self._recipe, self._device):
                loss = self._workload.loss(self._model, micro_batch)
            with recorder.span("backward"):
                self._pushing.last_pass(index == count - 1)
                share = loss / count if count > 1 else loss
                share.backward()  # type: ignore[no-untyped-call]  # torch's
            losses.append(loss.detach())
        if self._clipping is not None:
            nn.utils.clip_grad_norm_(self._model.parameters(), self._clipping)
        self._pushing.end()
        with recorder.span("optimizer"):
            self._pull()
        return losses[0] if count == 1 else torch.stack(losses).mean()

    def _pull(self) -> None:
        """The first server holds the answer back for the bound; the others' would be older."""
        one_by_one = self._bound not in (0, None)
        if not one_by_one:
            for server in self._servers:
                send_header(server, Kind.PULL)
        for server, inboxes in zip(self._servers, self._inboxes, strict=True):
            if one_by_one:
                send_header(server, Kind.PULL)
            for inbox in inboxes:
                receive(inbox, server)
                self._received[str(server)] += inbox.nbytes
        for flats, inboxes in zip(self._flat, self._inboxes, strict=True):
            for flat, inbox in zip(flats, inboxes, strict=True):
                if inbox is not flat:
                    flat.copy_(inbox, non_blocking=True)
        self._pulls += 1

    def set_learning_rate(self, learning_rate: float) -> None:
        self._rate = learning_rate

    def skipped_steps(self) -> int:
        return 0

    def step_shards(self, end_step: int) -> Iterator[StepShard] | None:
        """None if all wait for all anyway; else whatever the first server hands out."""
        return None if self._bound == 0 else self._asked_for(end_step)

    def _asked_for(self, end_step: int) -> Iterator[StepShard]:
        while True:
            try:
                send_header(self._servers[0], Kind.STEP_SHARD, end_step)
                step, share = receive_numbers(2, self._servers[0])
            except PeerGone as gone:
                raise server_gone(gone) from gone
            if step == NOTHING_LEFT:
                return
            yield StepShard(step=step, shard=Shard(index=share, count=self._workers))

    def close(self) -> None:
        for server in self._servers:
            say_farewell(server)
            send_header(server, Kind.CLOSE)

    def exchange(self) -> ExchangeRecord:
        return ExchangeRecord(
            pushes=self._pushing.pushes,
            pulls=self._pulls,
            sent_bytes=dict(self._pushing.sent_bytes),
            received_bytes=dict(self._received),
        )

    def full_parameters(self) -> dict[str, Tensor]:
        """The servers', in fp32 whatever travels otherwise; frozen ones are this rank's own."""
        held = self._asked(Kind.PARAMETERS)
        return {
            name: held.get(name, parameter.detach().cpu().clone())
            for name, parameter in self._model.named_parameters()
        }

    def full_gradients(self) -> dict[str, Tensor]:
        return self._asked(Kind.GRADIENTS)

    def full_optimizer_state(self) -> dict[str, dict[str, Tensor]]:
        state: dict[str, dict[str, Tensor]] = {}
        spec = self._recipe.optimizer
        keys = state_keys(spec)
        for server, part in zip(self._servers, self._layout, strict=True):
            send_header(server, Kind.STATE)
            for key in keys:
                for bucket in part:
                    flat = torch.empty(bucket.elements)
                    receive(flat, server)
                    for place in bucket.places:
                        state.setdefault(place.name, {})[key] = place.of(flat).clone()
        return state

    def _asked(self, kind: Kind) -> dict[str, Tensor]:
        """A tensor of every parameter that the servers hold, fp32."""
        found: dict[str, Tensor] = {}
        for server, part in zip(self._servers, self._layout, strict=True):
            send_header(server, kind)
            for bucket in part:
                flat = torch.empty(bucket.elements)
                receive(flat, server)
                found |= {place.name: place.of(flat).clone() for place in bucket.places}
        return found

    def buffers(self) -> dict[str, Tensor]:
        return {name: b.detach().cpu().clone() for name, b in self._model.named_buffers()}

    def checkpoint_state(self) -> CheckpointState:
        """The servers have the rest."""
        return CheckpointState(
            own={f"buffer/{name}": b.detach() for name, b in self._model.named_buffers()},
            counts={
                "pulls": self._pulls,
                "received_bytes": dict(self._received),
                "pushes": self._pushing.pushes,
                "sent_bytes": dict(self._pushing.sent_bytes),
            },
        )

    def load_checkpoint_state(self, kept: CheckpointState) -> None:
        for name, buffer in self._model.named_buffers():
            copied_into(buffer, kept.own[f"buffer/{name}"])
        self._pulls = kept.counts["pulls"]
        self._received.update(kept.counts["received_bytes"])
        self._pushing.pushes = kept.counts["pushes"]
        self._pushing.sent_bytes.update(kept.counts["sent_bytes"])
        for server, flats, part in zip(self._servers, self._flat, self._layout, strict=True):
            send_header(server, Kind.PARAMETERS)
            for flat, bucket in zip(flats, part, strict=True):
                whole = torch.empty(bucket.elements)
                receive(whole, server)
                copied_into(flat, whole.to(bucket.wire_type))  # as a pull would bring it

    def checkpoint_servers(self, step: int) -> None:
        try:
            for server in self._servers:
                send_header(server, Kind.KEEP, step)
            for server in self._servers:
                receive_numbers(1, server)
        except PeerGone as gone:
            raise server_gone(gone) from gone

    def held_state(self) -> HeldState:
        return HeldState(
            parameters=tuple(self._model.parameters()),
            gradients=tuple(self._pushing.gradients),
            optimizer_state=(),
        )


def _flattened(named: Mapping[str, nn.Parameter], bucket: Bucket) -> Tensor:
    """The bucket's parameters in one tensor, of which they become views."""
    flat = torch.cat([named[place.name].detach().flatten() for place in bucket.places])
    for place in bucket.places:
        named[place.name].data = place.of(flat)
    return flat


def _inbox(flat: Tensor, bucket: Bucket) -> Tensor:
    """Where the bucket arrives: in its place, or beside it if that is elsewhere or wider."""
    if flat.device.type == "cpu" and bucket.wire_type == flat.dtype:
        return flat
    pinned = flat.device.type == "cuda"
    return torch.empty(bucket.elements, dtype=bucket.wire_type, pin_memory=pinned)
