"""Counts the bytes that tensors hold while a step runs."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
import torch.utils._pytree as pytree  # torch has no public one
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor  # torch has no public one
from torch.utils._python_dispatch import TorchDispatchMode

from shardmark.predict.trace.chains import Total
from shardmark.predict.trace.tensor_sharding import storage_key

SEQUENCES = {list, tuple, torch.Size}
PLAIN = {bool, int, float, str, type(None), torch.dtype, torch.device}
PLAIN |= {torch.layout, torch.memory_format}
"""Types of arguments of operations that are no tensors and have none."""
QUERY_NAMESPACES = {"prim", "profiler"}
"""Namespaces of operators that compute nothing, such as a fake tensor's device."""


def tensors_of(values: Any) -> list[Tensor]:
    """Return the tensors that have a storage: of a sparse one its indices and values."""
    if isinstance(values, Tensor):
        return [values._indices(), values._values()] if values.is_sparse else [values]
    if type(values) is dict:
        values = tuple(values.values())
    elif type(values) not in SEQUENCES:  # these alone are many
        values = [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]
    return [tensor for value in values if type(value) not in PLAIN for tensor in tensors_of(value)]


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of storages from their first operation until they are freed."""

    def __init__(self, uncounted: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.bytes = self.peak = 0
        self._storages: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._replicated_bytes = 0
        self._replicated: dict[int, int] = {}
        """Bytes, by storage, that every tensor-parallel rank holds in full."""
        self.add(uncounted, counted=False)

    @property
    def live(self) -> Total:
        return Total(self.bytes, self._replicated_bytes)

    def add(
        self, tensors: Iterable[Tensor], *, counted: bool = True, replicated: bool = False
    ) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key = id(storage)
            if key in self._storages:
                continue
            size = storage.nbytes() if counted else 0
            self._storages[key] = (weakref.ref(storage, partial(self._freed, key)), size)
            self.bytes += size
            if replicated:
                self.add_replicated({key: size})
        self.peak = max(self.peak, self.bytes)

    def add_replicated(self, sizes: Mapping[int, int]) -> None:
        """Count these bytes, by storage, as held in full by every tensor-parallel rank."""
        for key, size in sizes.items():
            self._replicated[key] = self._replicated.get(key, 0) + size
            self._replicated_bytes += size

    def recount(self, storage: int, size: int) -> int:
        """Count so many bytes for a storage from now on; return those counted before."""
        reference, before = self._storages[storage]
        self._storages[storage] = (reference, size)
        self.bytes += size - before
        return before

    def release(self, tensor: Tensor) -> int:
        """Stop counting a tensor that is still alive; return its bytes."""
        key = storage_key(tensor)
        size = self.recount(key, 0)
        self.on_removed(key)
        return size

    def _freed(self, key: int, _: object) -> None:
        self.bytes -= self._storages.pop(key)[1]
        self.on_removed(key)

    def on_removed(self, storage: int) -> None:
        """Called when a storage is freed or released."""
        self._replicated_bytes -= self._replicated.pop(storage, 0)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function.namespace in QUERY_NAMESPACES:
            # Most calls of a trace ask this, and torch's own answer goes through all modes again.
            if function is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
                mode, device = args[0].fake_mode, args[0].fake_device
                return torch.device("meta") if mode.in_kernel_invocation else device
            return function(*args, **(kwargs or {}))
        self.before_operation()
        outputs = self.result(function, args, kwargs or {})
        self.add(tensors_of(outputs))
        self.after_operation(function, args, kwargs or {}, outputs)
        return outputs

    def before_operation(self) -> None:
        """Called before each operation."""

    def result(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Return what an operation computes."""
        return function(*args, **kwargs)

    def after_operation(self, function: Any, args: Any, kwargs: Any, outputs: Any) -> None:
        """Called after each operation."""
