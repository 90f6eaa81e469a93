"""Parameter server with a thread for each worker, which serves requests in order of arrival."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import chain, cycle

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardmark.base.errors import ShardmarkError
from shardmark.base.recipe import Recipe
from shardmark.base.results.schema import ExchangeRecord
from shardmark.extras.parameter_server.messages import (
    NOTHING_LEFT,
    Bucket,
    Counts,
    Header,
    Kind,
    PeerGone,
    receive,
    receive_header,
    receive_value,
    send,
    send_numbers,
    to_bytes,
)
from shardmark.extras.parameter_server.staleness_gate import StalenessGate
from shardmark.ranks.measure.memory.tensors import storage_bytes
from shardmark.ranks.strategies.base import HeldState
from shardmark.ranks.strategies.step import (
    build_optimizer,
    refuse_switched_weights,
    set_learning_rates,
    state_keys,
    state_tensors,
)
from shardmark.ranks.workloads.base import ParameterGroup


class GradientServer:
    """Holds its part of the parameters, and their optimizer.

    The optimizer sees each flat bucket as one parameter: SGD, Adam and AdamW work element by
    element, so that this is what they would do to the parameters in it, which are of one group.
    """

    def __init__(
        self,
        model: nn.Module,
        buckets: Sequence[Bucket],
        *,
        recipe: Recipe,
        workers: int,
        bound: int | None,
        norm_group: dist.ProcessGroup | None,
        groups: Sequence[ParameterGroup] = (),
    ) -> None:
        named = dict(model.named_parameters())
        self._flat = [nn.Parameter(bucket.flat(named)) for bucket in buckets]
        device = self._flat[0].device
        self._recipe = recipe
        first = (bucket.segments[0].name for bucket in buckets)  # all are of one group
        by_name = dict(zip(first, self._flat, strict=True))
        self._optimizer = build_optimizer(by_name, recipe, groups)
        refuse_switched_weights("a parameter server", self._optimizer)
        self._together = bound == 0
        self._norm_group = norm_group
        self._gate = StalenessGate(workers, bound)
        self._gate.on_gathered = self._record_exchange
        self._inboxes = [[b.message_buffer(device) for b in buckets] for _ in range(workers)]
        # Nobody changes the parameters of a barrier's round before all have them: no copy then.
        self._outboxes = [
            [
                flat.detach() if self._together and b.travels_as(flat) else b.message_buffer(device)
                for b, flat in zip(buckets, self._flat, strict=True)
            ]
            for _ in range(workers)
        ]
        self._averages = [torch.zeros_like(flat) for flat in self._flat] if self._together else []
        self._rounds = dict.fromkeys(range(workers), 0)
        self._averaged = self._used = 0
        self._rate = recipe.optimizer.lr
        self._read = dict.fromkeys(range(workers), 0)
        """Number of updates of the parameters at each worker's last pull."""
        self._failure: Exception | None = None
        self._counts = Counts()
        self._as_of_gather = ExchangeRecord(updates=0)
        self._answers: dict[Kind, Callable[[int, Header], None]] = {
            Kind.PUSH: self._take_push,
            Kind.PULL: self._answer_pull,
            Kind.GRADIENTS: self._send_tensors,
            Kind.PARAMETERS: self._send_tensors,
            Kind.STATE: self._send_tensors,
            Kind.STEP_SHARD: self._send_step_shard,
            Kind.GATHER: self._gather,
        }

    def serve(self) -> None:
        """Answer the workers until the last one has closed; raise if one dies before that."""
        for rank in range(len(self._inboxes)):
            threading.Thread(
                target=self._attend, args=(rank,), name=f"attend-{rank}", daemon=True
            ).start()
        with self._gate.changed:
            # Not for the threads' ends: a send to a process that has died never ends.
            self._gate.changed.wait_for(lambda: self._failure or not self._gate.present())
        if self._failure is not None:
            raise self._failure

    def _attend(self, rank: int) -> None:
        try:
            while (header := receive_header(rank)).kind is not Kind.CLOSE:
                self._answers[header.kind](rank, header)
            self._gate.leave(rank)
        except PeerGone as gone:
            self._fail(ShardmarkError(f"worker {gone.rank} is gone; see log.txt"))
        except Exception as error:  # the thread's end must not be the end of the news
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        """Keep the first failure, which causes the following ones."""
        with self._gate.changed:
            self._failure = self._failure or error
            self._gate.changed.notify_all()

    def _take_push(self, rank: int, header: Header) -> None:
        if self._together and self._rounds[rank] > self._averaged:
            raise ShardmarkError(f"worker {rank} sends gradients twice in a step")
        for inbox in self._inboxes[rank]:
            receive(inbox, rank)
            self._counts.received_bytes[str(rank)] += inbox.nbytes
        with self._gate.changed:
            self._counts.pushes += 1
            self._rate = header.rate
            self._gate.pushed(rank)
            if self._together:
                self._counts.staleness["0"] += 1
                self._rounds[rank] += 1
                if min(self._rounds.values()) == self._averaged + 1:
                    self._average()
            else:
                self._counts.staleness[str(self._counts.updates - self._read[rank])] += 1
                for flat, inbox in zip(self._flat, self._inboxes[rank], strict=True):
                    flat.grad = inbox.to(flat.device, torch.float32)
                self._update()

    def _average(self) -> None:
        for index, average in enumerate(self._averages):
            parts = [boxes[index].to(average.device, torch.float32) for boxes in self._inboxes]
            torch.add(parts[0], parts[1], out=average) if parts[1:] else average.copy_(parts[0])
            for part in parts[2:]:
                average.add_(part)
            average.div_(len(parts))
        self._averaged += 1
        self._gate.changed.notify_all()

    def _answer_pull(self, rank: int, header: Header) -> None:
        outboxes = self._outboxes[rank]
        with self._gate.changed:
            if self._together:
                self._wait_for_average(rank)
                self._use_average()
            else:
                self._gate.wait_for(lambda: self._gate.may_go_on(rank))
            self._read[rank] = self._counts.updates
            self._counts.pulls += 1
            for flat, outbox in zip(self._flat, outboxes, strict=True):
                if outbox.data_ptr() != flat.data_ptr():
                    outbox.copy_(flat.detach())
        for outbox in outboxes:
            send(outbox, rank)
            self._counts.sent_bytes[str(rank)] += outbox.nbytes

    def _wait_for_average(self, rank: int) -> None:
        """Wait until all gradients that the worker has pushed are averaged.

        Raises `ShardmarkError` if another worker left without pushing its own.
        """

        def left() -> list[int]:
            present = self._gate.present()
            rounds = self._rounds
            return [r for r in rounds if r not in present and rounds[r] < rounds[rank]]

        self._gate.wait_for(lambda: self._averaged >= self._rounds[rank] or bool(left()))
        if self._averaged < self._rounds[rank]:
            raise ShardmarkError(f"worker {left()[0]} has left in the middle of a step")

    def _use_average(self) -> None:
        """Update the parameters once a round, for the first worker that asks for the result."""
        if self._used == self._averaged:
            return
        self._used = self._averaged
        largest_norm, factor = self._recipe.gradient_clipping, None
        if largest_norm is not None:
            factor = clipping_factor(self._averages, largest_norm, self._norm_group)
        for flat, average in zip(self._flat, self._averages, strict=True):
            flat.grad = average if factor is None else average * factor
        self._update()

    def _update(self) -> None:
        set_learning_rates(self._optimizer.param_groups, self._rate)
        self._optimizer.step()
        self._counts.updates += 1

    def _send_tensors(self, rank: int, header: Header) -> None:
        """Send the averaged gradient of the step, the parameters, or the optimizer's state."""
        with self._gate.changed:
            pairs = zip(cycle(self._flat), self._tensors(rank, header.kind), strict=False)
            tensors = (torch.zeros_like(flat) if t is None else t for flat, t in pairs)
            copies = [tensor.detach().cpu().clone() for tensor in tensors]
        for tensor in copies:
            send(tensor, rank)

    def _tensors(self, rank: int, kind: Kind) -> Sequence[Tensor | None]:
        """Tensors of every bucket; None stands for zeros."""
        if kind is Kind.PARAMETERS:
            return self._flat
        if kind is Kind.STATE:
            states = [self._optimizer.state.get(flat, {}) for flat in self._flat]
            keys = state_keys(self._recipe.optimizer)
            return [state.get(key) for key in keys for state in states]
        if not self._together:
            return [flat.grad for flat in self._flat]
        self._wait_for_average(rank)
        return self._averages

    def _send_step_shard(self, rank: int, header: Header) -> None:
        step_shard = self._gate.step_shard(rank, header.number)
        send_numbers(list(step_shard or (NOTHING_LEFT, NOTHING_LEFT)), rank)

    def _gather(self, rank: int, header: Header) -> None:
        value = receive_value(header.number, rank)
        values = to_bytes(self._gate.gather(rank, value))
        send_numbers([len(values)], rank)
        send(values, rank)

    def _record_exchange(self) -> None:
        staleness = sorted(self._counts.staleness.items(), key=lambda item: int(item[0]))
        self._as_of_gather = ExchangeRecord(
            **self._counts.as_json() | {"staleness": dict(staleness)},
            wait_seconds=self._gate.wait_seconds,
        )

    def exchange(self) -> ExchangeRecord:
        """Traffic up to the last gathering: later steps do not belong to the training."""
        return self._as_of_gather

    def held_state(self) -> HeldState:
        gradients = [flat.grad for flat in self._flat if flat.grad is not None]
        return HeldState(
            parameters=tuple(self._flat),
            gradients=(*chain.from_iterable(self._inboxes), *self._averages, *gradients),
            optimizer_state=tuple(state_tensors(self._optimizer)),
        )

    def held_bytes(self) -> int:
        state = self.held_state()
        outboxes = chain.from_iterable(self._outboxes)
        tensors = (*state.parameters, *state.gradients, *state.optimizer_state, *outboxes)
        device = self._flat[0].device
        return storage_bytes(tensor for tensor in tensors if tensor.device == device)


def clipping_factor(
    parts: Sequence[Tensor], largest_norm: float, group: dist.ProcessGroup | None
) -> Tensor:
    """Return the factor of `torch.nn.utils.clip_grad_norm_`, shape (), on the parts' device.

    `group` has the servers with the other parts; None for a single server.
    """
    squares = torch.stack([part.square().sum() for part in parts]).sum().cpu()
    if group is not None:
        dist.all_reduce(squares, group=group)
    factor = (largest_norm / (squares.sqrt() + 1e-6)).clamp(max=1.0)
    return factor.to(parts[0].device)
