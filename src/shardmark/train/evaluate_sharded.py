"""An evaluation on a model whose every call is a collective of all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardmark.core.errors import InputError
from shardmark.core.shares import Shard
from shardmark.strategies.base import Worker
from shardmark.workloads.base import Workload


def evaluate_sharded(
    sharded: AbstractContextManager[nn.Module],
    worker: Worker,
    workload: Workload,
    shard: Shard,
    device: torch.device,
) -> list[object]:
    """Every share's part of the validation set; the first share's buffers are used."""
    group = worker.group
    # A rank without a sample would have nothing to call the model with.
    alone = workload.validation_samples < shard.count
    part = Shard(index=0, count=1) if alone else shard
    buffers = group.gather(worker.buffers() if shard.index == 0 else None)
    first = next(held for held in buffers if held is not None)
    with sharded as model, _buffers(model, cast("Mapping[str, Tensor]", first)):
        calls = _EqualCalls(model, device)
        try:
            result = workload.evaluate(model, part, device)
        except RuntimeError as error:
            if "DTensor" not in str(error):
                raise
            raise InputError(
                "the workload's evaluation",
                "it uses a part of a model that is too large to be held whole",
                "call the model only by model(...)",
            ) from error
        calls.finish()
    by_share = dict(cast("list[tuple[int, object]]", group.gather((part.index, result))))
    return [by_share[index] for index in sorted(by_share)]


@contextmanager
def _buffers(model: nn.Module, values: Mapping[str, Tensor]) -> Iterator[None]:
    own = {name: buffer.clone() for name, buffer in model.named_buffers()}
    _copy(model, values)
    try:
        yield
    finally:
        _copy(model, own)


def _copy(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(values[name])


class _EqualCalls:
    """Ranks that are done call the model again with what they called it last, for the others."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._model = model
        self._device = device
        self._last: tuple[tuple[Any, ...], dict[str, Any]] = (), {}
        self._hook = model.register_forward_pre_hook(self._called, prepend=True, with_kwargs=True)

    def _called(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._last = args, kwargs
        self._somebody_calls(here=True)

    def _somebody_calls(self, *, here: bool) -> bool:
        flag = torch.tensor(int(here), device=self._device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag)

    def finish(self) -> None:
        self._hook.remove()
        args, kwargs = self._last
        with torch.no_grad():
            while self._somebody_calls(here=False):
                self._model(*args, **kwargs)
