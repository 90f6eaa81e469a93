"""torch's two wrappers of replicas: lists of samples are shared out, unused parameters named."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.utils._pytree as pytree  # torch has no public one
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from shardmark.core.errors import InputError
from shardmark.strategies.parameters import listed

UNUSED_REMEDY = (
    "use every parameter in the loss, freeze it, or write the strategy as "
    "{name: ddp, find_unused_parameters: true}"
)


class Replicas(nn.DataParallel[nn.Module]):
    """Shares lists out by their items, a sample each; torch would cut every picture into strips.

    Other inputs are torch's to share.  `precision` is what each copy computes in: torch's threads
    open autocast without its type, which is then fp16.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        device_ids: Sequence[int] | None = None,
        precision: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        super().__init__(module, device_ids=device_ids)
        self._precision = precision

    def parallel_apply(
        self, replicas: Sequence[nn.Module], inputs: Sequence[Any], kwargs: Any
    ) -> list[Any]:
        def within(replica: nn.Module) -> Any:
            def called(*given: Any, **named: Any) -> Any:
                with self._precision():
                    return replica(*given, **named)

            return called

        return super().parallel_apply([within(r) for r in replicas], inputs, kwargs)

    def scatter(
        self,
        inputs: tuple[Any, ...],
        kwargs: dict[str, Any] | None,
        device_ids: Sequence[int | torch.device],
    ) -> Any:
        if not any(isinstance(value, list) for value in inputs):
            return super().scatter(inputs, kwargs, device_ids)
        cut = [shares(value, len(device_ids)) for value in inputs]
        used = device_ids[: min(map(len, cut))]
        scattered = tuple(
            tuple(moved(part[place], device) for part in cut) for place, device in enumerate(used)
        )
        return scattered, tuple(moved(dict(kwargs or {}), device) for device in used)

    def gather(self, outputs: Any, output_device: int | torch.device) -> Any:
        with warnings.catch_warnings():
            # Each device's losses are scalars; a vector of them is what is wanted.
            warnings.filterwarnings("ignore", message="Was asked to gather along dimension 0")
            return super().gather(outputs, output_device)


def shares(value: Any, parts: int) -> list[Any]:
    """Consecutive pieces, at most `parts`, as large as `torch.chunk` makes them."""
    if isinstance(value, Tensor):
        return list(value.chunk(parts))
    assert isinstance(value, list), "a model takes tensors and lists of samples"
    size = -(-len(value) // parts)
    return [value[start : start + size] for start in range(0, len(value), size)]


def moved(value: Any, device: int | torch.device) -> Any:
    """The same value with every tensor in it on the device."""

    def move(item: Any) -> Any:
        return item.to(device, non_blocking=True) if isinstance(item, Tensor) else item

    return pytree.tree_map(move, value)


class DistributedReplicas(DistributedDataParallel):
    """Names the parameters that got no gradient, where DDP waits for all of them."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        try:
            return super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            raise self._named(error) from error.__cause__

    def check_reduced(self) -> None:
        """Raise `InputError` after a backward pass in which DDP still waits for gradients."""
        try:
            self._check_reducer_finalized()  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            raise self._named(error) from error.__cause__

    def _named(self, error: RuntimeError) -> Exception:
        """The error, or an `InputError` with the parameters that it is about."""
        if "parameters that were not used in producing loss" not in str(error):
            return error
        found = f"{self._unused(str(error))} got no gradient"
        return InputError("strategy ddp", found, UNUSED_REMEDY)

    def _unused(self, told: str) -> str:
        """The parameters whose numbers DDP's message tells."""
        numbers = re.search(r"did not receive grad for rank \d+: ([\d ]+)", told)
        names = [name for name, p in self.module.named_parameters() if p.requires_grad]
        unused = [names[int(number)] for number in (numbers[1].split() if numbers else ())]
        return listed(unused) if unused else "some parameters"
