"""Initial weights of models that are too large for one rank, read from a file part by part.

A process beside the ranks of each node builds the full model and writes its weights to a file.  A
rank builds the model without parameters, and reads each part just before it is sharded.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardmark.base.errors import ShardmarkError
from shardmark.base.system.processes import die_with_parent
from shardmark.ranks.measure.memory.tensors import room_bytes
from shardmark.ranks.strategies.batch_norm import synchronise_batch_norms
from shardmark.ranks.strategies.execution import prepare
from shardmark.ranks.workloads.model_building import build_on_meta

if TYPE_CHECKING:
    from shardmark.base.recipe import Recipe
    from shardmark.ranks.strategies.base import RankContext
    from shardmark.ranks.workloads.base import Workload

COPIES_THAT_FIT = 4
"""A rank builds the full model if its memory has room for this many copies of the tensors:
gradients, optimizer state and, in an evaluation, a second copy need memory as well."""

logger = logging.getLogger(__name__)


def build_in_parts(
    workload: Workload,
    recipe: Recipe,
    context: RankContext,
    *,
    check: Callable[[nn.Module], object],
    parts: Callable[[nn.Module], Iterable[nn.Module]],
    shard: Callable[[nn.Module], object],
    shards_small: bool = True,
) -> tuple[nn.Module, bool]:
    """Build the model, call `check` with it, and `shard` with each of its parts and the model.

    The second returned value is True if the model is too large for one rank.  For a smaller model,
    `shard` is only called with `shards_small`.  Collective.
    """
    source = context.initial_weights
    meta_model = build_on_meta(workload) if source is not None else None
    room = room_bytes(context.device, context.local_world_size)
    model_bytes = 0 if meta_model is None else sum(t.nbytes for _, t in _tensors(meta_model))
    too_large = model_bytes * COPIES_THAT_FIT > room
    # Every rank calls both collectives, so that all ranks take the same branch.
    large = source is not None and _any_rank(too_large) and not _any_rank(meta_model is None)
    model = meta_model if large and meta_model is not None else workload.build_model()
    check(model)
    if recipe.sync_batch_norm:
        compiled = recipe.compile != "none"
        model = synchronise_batch_norms(model, context.device, compiled=compiled)
    weights = None
    if source is not None:
        weights = source.open(model) if large else None
        source.close()
    prepare(model, workload, recipe, keeps_strides=False)
    if not large and not shards_small:
        return model.to(context.device), False
    for part in (*parts(model), model):
        if weights is not None:
            weights.fill(part)
        shard(part)
    return model, large


def _tensors(model: nn.Module) -> Iterable[tuple[str, Tensor]]:
    return (*model.named_parameters(), *model.named_buffers())


def _any_rank(flag: bool) -> bool:
    """Return True if the flag is True on any rank.  Collective."""
    flags: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(flags, flag)
    return any(flags)


@dataclass(slots=True)
class InitialWeights:
    """File of a node with the initial weights, and the process that can write it.

    Create it with `fork` before threads and process groups exist: a process with them must not
    fork.
    """

    path: Path
    writer: tuple[int, int] | None = None
    """Process id and pipe of the writer, on the rank that starts the writing."""

    @classmethod
    def fork(cls, path: Path, *, leads: bool, build: Callable[[], nn.Module]) -> InitialWeights:
        """Fork the writer on the first rank of the node, where `leads` is True."""
        if not leads:
            return cls(path)
        read_end, write_end = os.pipe()
        parent_pid = os.getpid()
        pid = os.fork()
        if pid:
            os.close(read_end)
            return cls(path, (pid, write_end))
        code = 1
        try:
            die_with_parent(parent_pid)
            os.close(write_end)
            os.environ.pop("RANK")  # the writer is no rank
            if os.read(read_end, 1):
                write_weights(build(), path)
            code = 0
        except Exception:
            logger.exception("the initial weights cannot be written")
        finally:
            os._exit(code)

    def open(self, model: nn.Module) -> WeightsFile:
        """Have the file written, and open it.  Collective.

        Raises `ShardmarkError` if it cannot be written.
        """
        code = 0
        if self.writer is not None:
            pid, pipe = self.writer
            os.write(pipe, b"1")
            _, status = os.waitpid(pid, 0)
            code = os.waitstatus_to_exitcode(status)
            os.close(pipe)
            self.writer = None
        if _any_rank(bool(code)):
            raise ShardmarkError("the model's initial weights could not be built or written")
        weights = WeightsFile(self.path.open("rb"), model)
        dist.barrier()  # all ranks have opened it
        self.path.unlink(missing_ok=True)
        return weights

    def close(self) -> None:
        """End the writer if it has not been used."""
        if self.writer is not None:
            pid, pipe = self.writer
            os.close(pipe)
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)
            self.writer = None


def write_weights(model: nn.Module, path: Path) -> None:
    """Write the bytes of all parameters and buffers, one after the other."""
    with path.open("wb") as file:
        for _, tensor in _tensors(model):
            flat = tensor.detach().cpu().contiguous().reshape(-1)
            file.write(flat.view(torch.uint8).numpy().data)


class WeightsFile:
    """Reader of a file of `write_weights`, for the same model on the meta device."""

    def __init__(self, file: BufferedReader, model: nn.Module) -> None:
        """Raises `ShardmarkError` if the file is that of another model."""
        self._file = file
        self._offsets: dict[int, int] = {}
        self._types: dict[int, torch.dtype] = {}
        """Types in the file; the model's may be narrowed later."""
        self._owners: dict[int, list[tuple[nn.Module, str]]] = {}
        """Modules and attribute names by id of the meta parameter; tied parameters have several."""
        offset = 0
        for _, tensor in _tensors(model):
            self._offsets[id(tensor)] = offset
            self._types[id(tensor)] = tensor.dtype
            offset += tensor.nbytes
        if offset != os.fstat(file.fileno()).st_size:
            raise ShardmarkError("the model differs when it is built without weights")
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                self._owners.setdefault(id(parameter), []).append((module, name))
        self._meta_parameters = [*model.parameters()]  # keeps their ids unique

    def fill(self, part: nn.Module) -> None:
        """Read the parameters and buffers of the part's modules, on the CPU."""
        for meta in [parameter for parameter in part.parameters() if parameter.is_meta]:
            parameter = nn.Parameter(self._read(meta), requires_grad=meta.requires_grad)
            for module, name in self._owners[id(meta)]:
                module.register_parameter(name, parameter)
        for buffer in part.buffers():
            buffer.copy_(self._read(buffer))

    def _read(self, tensor: Tensor) -> Tensor:
        dtype = self._types[id(tensor)]
        data = np.empty(tensor.numel() * dtype.itemsize, dtype=np.uint8)
        self._file.seek(self._offsets[id(tensor)])
        if self._file.readinto(data.data) != data.nbytes:
            raise ShardmarkError("the file of initial weights ends early")
        return torch.from_numpy(data).view(dtype).reshape(tensor.shape).to(tensor.dtype)
