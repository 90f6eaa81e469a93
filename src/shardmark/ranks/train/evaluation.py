"""Evaluation on the full model, or on the sharded one if the full model fits on no rank."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardmark.base.errors import InputError
from shardmark.base.layout import Shard
from shardmark.ranks.strategies.base import Worker
from shardmark.ranks.train.one_rank import one_rank
from shardmark.ranks.train.record import Evaluation
from shardmark.ranks.workloads.base import Workload


def evaluate(worker: Worker, workload: Workload, shard: Shard, device: torch.device) -> Evaluation:
    """Evaluate the whole validation set once.  Collective.

    Each distinct share of the training ranks evaluates its part of the samples.  All ranks use the
    buffers of the first share.
    """
    worker.group.barrier()
    started = time.perf_counter()
    sharded = worker.evaluation_model()
    with worker.evaluated_weights():
        if sharded is not None:
            parts = _on_shards(sharded, worker, workload, shard, device)
        else:
            parts = _on_full_model(worker, workload, shard, device)
    return Evaluation(seconds=time.perf_counter() - started, quality=dict(workload.quality(parts)))


def _on_full_model(
    worker: Worker, workload: Workload, shard: Shard, device: torch.device
) -> list[object]:
    """Evaluate every share's part of the samples, on a model that each rank assembles."""
    parameters, buffers = worker.full_parameters(), _buffers_of_first(worker, shard)
    model = workload.build_model()
    model.load_state_dict({**parameters, **buffers}, strict=False)
    # The task sees one process: a collective of its own would wait for ranks with fewer batches.
    with one_rank():
        model.to(device)
        model.eval()  # a user's method may return nothing
        result = workload.evaluate(model, shard, device)
    return _by_share(worker, shard, result)


def _buffers_of_first(worker: Worker, shard: Shard) -> Mapping[str, Tensor]:
    """Return the buffers of the first rank with the first share.  Collective."""
    gathered = worker.group.gather(worker.buffers() if shard.index == 0 else None)
    return cast("Mapping[str, Tensor]", next(item for item in gathered if item is not None))


def _by_share(worker: Worker, shard: Shard, result: object) -> list[object]:
    """Return one result for each share, in order of shares.  Collective."""
    by_share = dict(cast("list[tuple[int, object]]", worker.group.gather((shard.index, result))))
    return [by_share[index] for index in sorted(by_share)]


def _on_shards(
    sharded: AbstractContextManager[nn.Module],
    worker: Worker,
    workload: Workload,
    shard: Shard,
    device: torch.device,
) -> list[object]:
    """Evaluate every share's part, on a model whose every call is a collective of all ranks."""
    # A rank without a batch would have nothing to call the model with.
    alone = workload.validation_batches < shard.count
    part = Shard(index=0, count=1) if alone else shard
    buffers = _buffers_of_first(worker, shard)
    with sharded as model, _buffers(model, buffers):
        calls = _EqualCalls(model, device)
        try:
            result = workload.evaluate(model, part, device)
        except RuntimeError as error:
            if "DTensor" not in str(error):
                raise
            raise InputError(
                "the workload's evaluation",
                "it uses a module of a model that is too large for one rank",
                "call the model only by model(...)",
            ) from error
        calls.finish()
    return _by_share(worker, part, result)


@contextmanager
def _buffers(model: nn.Module, values: Mapping[str, Tensor]) -> Iterator[None]:
    """Give the model other buffers until the context ends."""
    original = {name: buffer.clone() for name, buffer in model.named_buffers()}
    _copy(model, values)
    try:
        yield
    finally:
        _copy(model, original)


def _copy(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(values[name])


class _EqualCalls:
    """Makes all ranks call a sharded model equally often.

    A rank that has finished repeats its last call until the other ranks have finished.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._model = model
        self._device = device
        self._last: tuple[tuple[Any, ...], dict[str, Any]] = (), {}
        self._hook = model.register_forward_pre_hook(self._called, prepend=True, with_kwargs=True)

    def _called(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._last = args, kwargs
        self._any_rank_calls(calls=True)

    def _any_rank_calls(self, *, calls: bool) -> bool:
        flag = torch.tensor(int(calls), device=self._device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag)

    def finish(self) -> None:
        self._hook.remove()
        args, kwargs = self._last
        with torch.no_grad():
            while self._any_rank_calls(calls=False):
                self._model(*args, **kwargs)
