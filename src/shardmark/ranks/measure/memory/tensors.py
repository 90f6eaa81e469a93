"""Measures the bytes that a rank's tensors hold, its allocator's peak, and available memory."""

from __future__ import annotations

import gc
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any

import psutil
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor  # torch has no public one
from torch.distributed.tensor import DTensor

from shardmark.ranks.measure.kernel_files import cgroup_limits

if TYPE_CHECKING:
    from torch.autograd.profiler import profile


class CudaPeak:
    """Peak of allocated and reserved bytes in the measured windows, on the device with most.

    Source: torch.cuda memory statistics.  Tensors hold `allocated`; the caching allocator has got
    `reserved` from the driver.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices = devices
        self.allocated_bytes: int | None = None
        self.reserved_bytes: int | None = None

    def window_started(self) -> None:
        for device in self._devices:
            torch.cuda.reset_peak_memory_stats(device)

    def window_stopped(self) -> None:
        allocated = max(map(torch.cuda.max_memory_allocated, self._devices))
        reserved = max(map(torch.cuda.max_memory_reserved, self._devices))
        self.allocated_bytes = max(self.allocated_bytes or 0, allocated)
        self.reserved_bytes = max(self.reserved_bytes or 0, reserved)


@contextmanager
def temporary_memory(device: torch.device) -> Iterator[None]:
    """Return to the driver, at the end, what is allocated inside the block on a CUDA device.

    Without it the caching allocator would keep the blocks of an evaluation, and they would count in
    the next windows.  Cached blocks of the training stay, so that its next step can use them.
    """
    if device.type != "cuda" or torch.cuda.get_allocator_backend() != "native":
        yield  # neither the CPU's allocator nor cudaMallocAsync caches
        return
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool, device):
        yield
    torch.cuda.synchronize(device)
    del pool  # frees its blocks


def room_bytes(device: torch.device, processes: int) -> int:
    """Memory that one process can use: the lesser of the device's and its share of the host's.

    `processes` share the host's available memory, or the container's limit, equally; RLIMIT_DATA
    limits each.
    """
    import resource  # Windows has none

    host = psutil.virtual_memory().available
    limit = cgroup_limits().memory_bytes
    room = [min(host, limit or host) // processes]
    soft, _ = resource.getrlimit(resource.RLIMIT_DATA)
    if soft != resource.RLIM_INFINITY:
        room.append(max(0, soft - psutil.Process().memory_info().data))
    if device.type == "cuda":
        room.append(torch.cuda.mem_get_info(device)[0])
    return min(room)


def storage_bytes(tensors: Iterable[Tensor], *, seen: set[int] | None = None) -> int:
    """Bytes of the tensors' storages, each counted once; a DTensor counts as its local tensor.

    Storages whose address is in `seen` are not counted; addresses that are counted are added.
    """
    counted = set() if seen is None else seen
    total = 0
    dense = ([t._indices(), t._values()] if t.is_sparse else [t] for t in map(local, tensors))
    for tensor in chain.from_iterable(dense):
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address and address not in counted:
            counted.add(address)
            total += storage.nbytes()
    return total


def is_on(device_type: str, tensor: Tensor) -> bool:
    """True if the tensor, or the local tensor of a DTensor, is on that type of device."""
    return local(tensor).device.type == device_type


def local(tensor: Tensor) -> Tensor:
    """The local tensor of a DTensor; any other tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def live_tensor_bytes(device_type: str) -> int:
    """Bytes of all tensors that Python can reach on that type of device, each storage once."""
    return storage_bytes(live_tensors(device_type))


def live_tensors(device_type: str) -> list[Tensor]:
    """Return all tensors that Python can reach on that type of device, DTensors as local ones."""
    with warnings.catch_warnings():
        # Inspecting every object touches deprecated lazy attributes of other libraries.
        warnings.simplefilter("ignore")
        return [item for item in gc.get_objects() if _is_plain_tensor(item, device_type)]


def _is_plain_tensor(item: object, device_type: str) -> bool:
    try:
        return (
            issubclass(type(item), Tensor)
            # A DTensor's local tensor is another object; a fake tensor has no memory.
            and not isinstance(item, DTensor | FakeTensor)
            and item.device.type == device_type  # type: ignore[attr-defined]  # a Tensor by now
            and item.layout in (torch.strided, torch.sparse_coo)  # type: ignore[attr-defined]
        )
    except (RuntimeError, ReferenceError, AttributeError):
        return False  # a fake or dying object has no memory


def allocator_rise_bytes(profiled: profile, *, since_nanoseconds: int) -> int:
    """Largest rise of the CPU allocator's total above its level at an instant of the profile.

    The instant must be one step after the start of the profile: the profiler does not see blocks
    from before the profile being freed, and after one step none of them is left.  It does not see
    blocks freed by gloo's threads either.  Such a block counts as freed at the end of the outermost
    operation that allocated it, unless the step before left a block of that size to this one.
    """
    blocks = [block for block in _blocks(profiled) if block[0] >= since_nanoseconds]
    changes: list[tuple[int, int]] = []
    alive: dict[int, tuple[int, int]] = {}
    left_before: Counter[int] = Counter()
    for at_nanoseconds, size, address, until_nanoseconds in sorted(blocks):
        before = alive.pop(address, None)
        if size < 0 and before is None:
            left_before[-size] += 1
        elif size > 0:
            if before is not None:  # its address is in use again
                changes.append((min(at_nanoseconds, before[1]), -before[0]))
            alive[address] = (size, until_nanoseconds)
        changes.append((at_nanoseconds, size))
    for size, until_nanoseconds in alive.values():
        if left_before[size]:
            left_before[size] -= 1
        else:
            changes.append((until_nanoseconds, -size))
    level = highest = 0
    for _, change in sorted(changes):
        level += change
        highest = max(highest, level)
    return highest


def _blocks(profiled: profile) -> Iterator[tuple[int, int, int, int]]:
    """Yield instant, size (negative for a release), address, and end of the outermost operation."""
    results = profiled.kineto_results
    assert results is not None, "the profile has not ended"
    for outermost in results.experimental_event_tree():
        waiting: list[Any] = [outermost]
        while waiting:
            event = waiting.pop()
            waiting += event.children
            if event.name == "[memory]" and event.extra_fields.device.type == "cpu":
                block = event.extra_fields
                at_nanoseconds = event.start_time_ns
                until = max(at_nanoseconds, outermost.end_time_ns)
                yield at_nanoseconds, block.alloc_size, block.ptr, until
