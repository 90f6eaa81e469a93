"""Models too large for one rank: their first weights come part by part from a file.

A process beside the ranks of each node builds the model as for every other strategy, and writes it
to a file.  A rank builds it without parameters, and reads each part just before it is sharded.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardmark.core.errors import ShardmarkError
from shardmark.core.processes import die_with_parent
from shardmark.measure.memory.tensors import room_bytes
from shardmark.strategies.batch_norm import synchronise_batch_norms
from shardmark.strategies.execution import prepare

if TYPE_CHECKING:
    from shardmark.core.recipe import Recipe
    from shardmark.strategies.base import RankContext
    from shardmark.workloads.base import Workload

ROOM = 4
"""A model is held whole where so many copies of its tensors would fit: beside it come gradients,
optimizer state and, in an evaluation, a second copy."""

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
    """The model after `check` was called with it, and `shard` with each of its parts and itself.

    The second value says whether it is too large to be held whole; else `shards_small` says
    whether `shard` is called at all.  Collective.
    """
    source = context.initial_weights
    hollow = build_on_meta(workload) if source is not None else None
    room = room_bytes(context.device, context.local_world_size)
    too_large = hollow is not None and _bytes(hollow) * ROOM > room
    # Asked of every rank, whatever it has found: all have to go the same way.
    large = source is not None and _any_rank(too_large) and not _any_rank(hollow is None)
    model = hollow if large and hollow is not None else workload.build_model()
    check(model)
    if recipe.sync_batch_norm:
        compiled = recipe.compile != "none"
        model = synchronise_batch_norms(model, context.device, compiled=compiled)
    weights = None
    if source is not None:
        weights = source.written(model) if large else None
        source.close()
    prepare(model, workload, recipe, keeps_strides=False)
    if not large and not shards_small:
        return model.to(context.device), False
    for part in (*parts(model), model):
        if weights is not None:
            weights.fill(part)
        shard(part)
    return model, large


def build_on_meta(workload: Workload) -> nn.Module | None:
    """The model with its parameters on the meta device; None where it cannot be built so."""
    try:
        with _parameters_on_meta():
            return workload.build_model()
    except Exception as error:  # whatever the constructor does with its weights
        logger.info("the model cannot be built without its weights: %s", error)
        return None


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Every parameter gives up its memory as soon as a module has it."""
    register = nn.Module.register_parameter

    def hollow(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            trained = parameter.requires_grad
            parameter = nn.Parameter(parameter.detach().to("meta"), requires_grad=trained)
        register(module, name, parameter)

    nn.Module.register_parameter = hollow  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _tensors(model: nn.Module) -> Iterable[tuple[str, Tensor]]:
    return (*model.named_parameters(), *model.named_buffers())


def _bytes(model: nn.Module) -> int:
    return sum(tensor.nbytes for _, tensor in _tensors(model))


def _any_rank(here: bool) -> bool:
    answers: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(answers, here)
    return any(answers)


@dataclass(slots=True)
class InitialWeights:
    """One node's file of weights, and the process that waits to write it.

    `forked` before there are threads or a process group: a process with them forks badly.
    """

    path: Path
    writer: tuple[int, int] | None = None
    """Process and pipe: of the rank alone that asks it."""

    @classmethod
    def forked(cls, path: Path, *, leads: bool, build: Callable[[], nn.Module]) -> InitialWeights:
        """On the node's first rank, which `leads`, with the process."""
        if not leads:
            return cls(path)
        asked, ask = os.pipe()
        own_pid = os.getpid()
        pid = os.fork()
        if pid:
            os.close(asked)
            return cls(path, (pid, ask))
        code = 1
        try:
            die_with_parent(own_pid)
            os.close(ask)
            os.environ.pop("RANK")  # it is none
            if os.read(asked, 1):
                write_weights(build(), path)
            code = 0
        except Exception:
            logger.exception("the first weights cannot be written")
        finally:
            os._exit(code)

    def written(self, model: nn.Module) -> WeightsFile:
        """The file, once it is there.  Collective.  Raises `ShardmarkError` where it is not."""
        code = 0
        if self.writer is not None:
            pid, pipe = self.writer
            os.write(pipe, b"1")
            _, status = os.waitpid(pid, 0)
            code = os.waitstatus_to_exitcode(status)
            os.close(pipe)
            self.writer = None
        if _any_rank(bool(code)):
            raise ShardmarkError("the model's first weights could not be built or written")
        weights = WeightsFile(self.path.open("rb"), model)
        dist.barrier()  # everybody has opened it
        self.path.unlink(missing_ok=True)
        return weights

    def close(self) -> None:
        """Nobody will ask any more."""
        if self.writer is not None:
            pid, pipe = self.writer
            os.close(pipe)
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)
            self.writer = None


def write_weights(model: nn.Module, path: Path) -> None:
    """All parameters and buffers, one after the other, as they lie in memory."""
    with path.open("wb") as file:
        for _, tensor in _tensors(model):
            file.write(_as_bytes(tensor).numpy().data)


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


class WeightsFile:
    """Reads what `write_weights` wrote, for the same model without parameters."""

    def __init__(self, file: BufferedReader, model: nn.Module) -> None:
        """Raises `ShardmarkError` where the file is another model's."""
        self._file = file
        self._offsets: dict[int, int] = {}
        self._owners: dict[int, list[tuple[nn.Module, str]]] = {}
        """By the parameter without memory: a tied one has several."""
        offset = 0
        for _, tensor in _tensors(model):
            self._offsets[id(tensor)] = offset
            offset += tensor.nbytes
        if offset != os.fstat(file.fileno()).st_size:
            raise ShardmarkError("the model is another one when its weights are left out")
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                self._owners.setdefault(id(parameter), []).append((module, name))
        self._hollow = [*model.parameters()]  # while they live, no other object has their id

    def fill(self, part: nn.Module) -> None:
        """Give the part's modules their parameters and buffers, on the CPU."""
        for hollow in [each for each in part.parameters() if each.is_meta]:
            parameter = nn.Parameter(self._read(hollow), requires_grad=hollow.requires_grad)
            for module, name in self._owners[id(hollow)]:
                module.register_parameter(name, parameter)
        for buffer in part.buffers():
            buffer.copy_(self._read(buffer))

    def _read(self, tensor: Tensor) -> Tensor:
        data = np.empty(tensor.nbytes, dtype=np.uint8)
        self._file.seek(self._offsets[id(tensor)])
        if self._file.readinto(data.data) != tensor.nbytes:
            raise ShardmarkError("the file of first weights ends early")
        return torch.from_numpy(data).view(tensor.dtype).reshape(tensor.shape)
