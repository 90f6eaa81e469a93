"""Takes the other ranks away: collectives return at once, with what this rank has."""

from __future__ import annotations

import copy
import inspect
import sys
import traceback
from collections.abc import Callable
from itertools import chain
from operator import is_not
from typing import Any

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree  # torch has no public one
from torch import Tensor
from torch._C._distributed_c10d import _create_work_from_future  # torch's own wrapper of a result
from torch.distributed import distributed_c10d as c10d

from shardmark.base.errors import ShardmarkError
from shardmark.scripts.interventions.base import NAMES, Intervention, replace

OBJECTS: dict[str, str] = NAMES["results_of_collectives_of_objects"]
"""Collectives of Python's objects, and the argument that takes the results."""
METHODS: dict[str, list[str]] = NAMES["methods_of_groups"]


class NoPeers(Intervention):
    """Process groups forward to the real ones until the warm-up is over, and are silent then.

    Set-up, checks and agreements of the script happen, so that all libraries run on as they would.
    """

    def install(self) -> None:
        if not hasattr(c10d, "_register_pg_in_world"):
            raise ShardmarkError(f"peers cannot be taken away with torch {torch.__version__}")
        self.silent = False
        self.objects: dict[object, Any] = {}
        """Results of collectives of objects by the lines that call; None where it has none."""
        groups: dict[Any, Any] = {}

        def register(original: Callable[..., Any], group: Any, *rest: Any, **more: Any) -> Any:
            groups[group] = self.wrapped(group)
            return original(groups[group], *rest, **more)

        def create(original: Callable[..., Any], *rest: Any, **more: Any) -> Any:
            group, store = original(*rest, **more)
            return groups.get(group, group), store

        replace(c10d, "_register_pg_in_world", register)
        replace(c10d, "_new_process_group_helper", create)
        for name in OBJECTS:
            for module in (dist, c10d):
                replace(module, name, self.of_objects)

    def begin(self) -> None:
        self.silent = True

    def wrapped(self, group: Any) -> Any:
        """Return a group that is silent if this intervention is."""
        owner = self

        class Group(dist.ProcessGroup):
            def getBackendName(self) -> str:  # noqa: N802  (torch's name)
                return str(group.name())

        for name in {*chain(*METHODS.values())} & {*dir(dist.ProcessGroup)}:
            setattr(Group, name, _method(owner, group, name))
        made = Group(group.rank(), group.size())
        for number, device in enumerate(group._device_types):
            backend = group._get_backend(device)
            kind = getattr(dist.ProcessGroup.BackendType, backend.name().upper(), None)
            kind = dist.ProcessGroup.BackendType.CUSTOM if kind is None else kind
            if not number:
                made._set_default_backend(kind)
            made._register_backend(device, kind, backend)
        made._set_group_name(group.group_name)
        made._set_group_desc(group.group_desc)
        return made

    def of_objects(self, original: Callable[..., Any], *arguments: Any, **keywords: Any) -> None:
        """Give the results of the latest real call from these lines; the first one is real."""
        bound = inspect.signature(original).bind(*arguments, **keywords).arguments
        results = bound.get(OBJECTS[original.__name__])
        callers = traceback.walk_stack(sys._getframe())
        lines = (original, *((frame.f_code, line) for frame, line in callers))
        if not self.silent or lines not in self.objects:
            silent, self.silent = self.silent, False
            before = [] if results is None else [*results]
            original(*arguments, **keywords)
            changed = results is not None and any(map(is_not, before, results))
            self.objects[lines] = copy.deepcopy(results) if changed else None
            self.silent = silent
        elif results is not None and self.objects[lines] is not None:
            results[:] = copy.deepcopy(self.objects[lines])


def _method(owner: NoPeers, group: Any, name: str) -> Callable[..., Any]:
    def call(_: Any, *arguments: Any, **keywords: Any) -> Any:
        if not owner.silent:
            return getattr(group, name)(*arguments, **keywords)
        outputs = arguments[0] if arguments and name not in METHODS["waits"] else []
        if name in METHODS["gathers"]:
            for output, shard in _pairs(outputs, arguments[1]):
                for part in output if isinstance(output, list) else output.chunk(group.size()):
                    part.copy_(shard.view_as(part))
        elif name in METHODS["scatters"]:
            for output, tensor in _pairs(outputs, arguments[1]):
                parts = tensor if isinstance(tensor, list) else tensor.chunk(group.size())
                output.copy_(parts[group.rank()].view_as(output))
        elif name in METHODS["exchanges"]:
            for output, tensor in _pairs(outputs, arguments[1]):
                output.copy_(tensor if tensor.shape == output.shape else torch.zeros_like(output))
        elif name in METHODS["receives"]:
            for output in outputs:
                output.zero_()
        done: torch.futures.Future[Any] = torch.futures.Future()
        done.set_result(pytree.tree_leaves(outputs))
        return _create_work_from_future(done)

    disabled: Callable[..., Any] = torch.compiler.disable(call)  # type: ignore[no-untyped-call]
    return disabled


def _pairs(outputs: Any, inputs: Any) -> list[tuple[Any, Any]]:
    if isinstance(outputs, Tensor):
        return [(outputs, inputs)]
    return [*zip(outputs, inputs, strict=False)]  # one of the ranks has both of them
