"""Subclasses of torch's two wrappers of replicas: lists of samples are split, errors explained."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.utils._pytree as pytree  # torch has no public one
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from shardmark.base.errors import InputError
from shardmark.ranks.strategies.base import first_names

UNUSED_REMEDY = (
    "use every parameter in the loss, freeze it, or write the strategy as "
    "{name: ddp, find_unused_parameters: true}"
)


class Replicas(nn.DataParallel[nn.Module]):
    """Splits lists of samples over the devices; torch would split every sample.

    torch splits other inputs.  `precision` opens the autocast of each replica: torch's threads
    would open it without the type, which is then fp16.
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
            def call(*args: Any, **kwargs: Any) -> Any:
                with self._precision():
                    return replica(*args, **kwargs)

            return call

        return super().parallel_apply([within(r) for r in replicas], inputs, kwargs)

    def scatter(
        self,
        inputs: tuple[Any, ...],
        kwargs: dict[str, Any] | None,
        device_ids: Sequence[int | torch.device],
    ) -> Any:
        if not any(isinstance(value, list) for value in inputs):
            return super().scatter(inputs, kwargs, device_ids)
        chunks = [split(value, len(device_ids)) for value in inputs]
        used = device_ids[: min(map(len, chunks))]
        scattered = tuple(
            tuple(moved(parts[index], device) for parts in chunks)
            for index, device in enumerate(used)
        )
        return scattered, tuple(moved(dict(kwargs or {}), device) for device in used)

    def gather(self, outputs: Any, output_device: int | torch.device) -> Any:
        with warnings.catch_warnings():
            # Each device has a scalar loss; the vector of losses is intended.
            warnings.filterwarnings("ignore", message="Was asked to gather along dimension 0")
            return super().gather(outputs, output_device)


def split(value: Any, parts: int) -> list[Any]:
    """Split into at most `parts` consecutive chunks, of the sizes of `torch.chunk`."""
    if isinstance(value, Tensor):
        return list(value.chunk(parts))
    assert isinstance(value, list), "inputs of a model are tensors and lists of samples"
    size = -(-len(value) // parts)
    return [value[start : start + size] for start in range(0, len(value), size)]


def moved(value: Any, device: int | torch.device) -> Any:
    """Return the same structure with every tensor on the device."""

    def move(leaf: Any) -> Any:
        return leaf.to(device, non_blocking=True) if isinstance(leaf, Tensor) else leaf

    return pytree.tree_map(move, value)


class DistributedReplicas(DistributedDataParallel):
    """DDP whose error about unused parameters names them, and which counts its buckets' bytes."""

    def __init__(self, module: nn.Module, **arguments: Any) -> None:
        super().__init__(module, **arguments)
        self._trained = [p for p in module.parameters() if p.requires_grad]
        self._seen_gradients: list[Tensor] = []

    def synchronise(self, last: bool) -> None:
        """Reduce the gradients of the next backward pass if it is the last one of the step."""
        self.require_backward_grad_sync = last  # what `no_sync` sets

    def cast_gradients(self, precision: str) -> None:
        """Cast gradients to `bf16` or `fp16` for their reduction, by torch's hook."""
        hook = getattr(default_hooks, f"{precision}_compress_hook")
        # DDP refuses bf16's hook by its name except for NCCL; gloo also adds bf16.
        self.register_comm_hook(None, lambda state, bucket: hook(state, bucket))  # noqa: PLW0108

    def untracked_bytes(self) -> int:
        """Bytes of gradients in the reducer's buckets, until Python has seen tensors of them.

        Gradients are views of the buckets.  References to them are kept here, so that Python
        continues to see them after they are dropped.
        """
        if gradients := [p.grad for p in self._trained if p.grad is not None]:
            self._seen_gradients[:] = gradients
        if self._seen_gradients:
            return 0
        return sum(p.numel() * p.element_size() for p in self._trained)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        try:
            return super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            raise self._named(error) from error.__cause__

    def check_reduced(self) -> None:
        """Raise `InputError` if DDP still waits for gradients after a backward pass."""
        try:
            self._check_reducer_finalized()  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            raise self._named(error) from error.__cause__

    def _named(self, error: RuntimeError) -> Exception:
        """Return the error, or an `InputError` that names the unused parameters."""
        if "parameters that were not used in producing loss" not in str(error):
            return error
        return InputError(
            "strategy ddp", f"{self._unused(str(error))} got no gradient", UNUSED_REMEDY
        )

    def _unused(self, message: str) -> str:
        """Names of the parameters whose numbers are in DDP's message."""
        numbers = re.search(r"did not receive grad for rank \d+: ([\d ]+)", message)
        names = [name for name, p in self.module.named_parameters() if p.requires_grad]
        unused = [names[int(number)] for number in (numbers[1].split() if numbers else ())]
        return first_names(unused) if unused else "some parameters"
