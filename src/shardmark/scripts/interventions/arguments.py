"""Adds arguments to calls of torch's classes, where the script gives none."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch.distributed import fsdp
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer
from torch.utils.data import DataLoader, IterableDataset

from shardmark.scripts.interventions.base import Intervention, line_of, replace


class Arguments(Intervention):
    """Adds keyword arguments to calls of functions, and notes the lines of the calls."""

    added: ClassVar[dict[str, Any]] = {}
    owners: ClassVar[tuple[tuple[Any, str], ...]] = ()
    """Classes or modules with the names of their functions."""

    def install(self) -> None:
        self.places: dict[str, dict[str, dict[str, Any]]] = {}
        """Arguments by `FILE:LINE` and name of the class or function."""
        for owner, name in self.functions():
            replace(owner, name, self._call)

    def functions(self) -> Iterator[tuple[Any, str]]:
        yield from self.owners

    def more(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return what is added to a call with these arguments."""
        return {} if arguments.keys() & self.added.keys() else self.added

    def _call(self, original: Any, *arguments: Any, **keywords: Any) -> Any:
        signature = inspect.signature(original)
        more = self.more(signature.bind(*arguments, **keywords).arguments)
        if more.keys() & signature.bind_partial(*arguments).arguments.keys():
            more = {}  # the script gives it by its place
        if more and (place := line_of(sys._getframe(2))):
            named = type(arguments[0]) if original.__name__ == "__init__" else original
            self.places[place] = {named.__name__: more}
        return original(*arguments, **{**keywords, **more})

    def facts(self) -> dict[str, object]:
        return {"places": self.places}


class Workers(Arguments):
    """Loads in as many processes as the value says, which live on."""

    owners = ((DataLoader, "__init__"),)

    def more(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        count, is_stream = int(self.value), isinstance(arguments["dataset"], IterableDataset)
        if is_stream or (arguments.get("num_workers") or 0) >= count:
            return {}
        return {"num_workers": count, "persistent_workers": True}


class Prefetch(Arguments):
    """Each worker loads as many batches ahead as the value says."""

    owners = ((DataLoader, "__init__"),)

    def more(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        chosen = arguments.get("prefetch_factor") or not arguments.get("num_workers")
        return {} if chosen else {"prefetch_factor": int(self.value)}


class PinMemory(Arguments):
    owners = ((DataLoader, "__init__"),)
    added: ClassVar[dict[str, Any]] = {"pin_memory": True}


class Fused(Arguments):
    """Updates all parameters in one kernel."""

    added: ClassVar[dict[str, Any]] = {"fused": True}

    def functions(self) -> Iterator[tuple[Any, str]]:
        for kind in vars(torch.optim).values():
            if isinstance(kind, type) and issubclass(kind, Optimizer):
                names = inspect.signature(kind).parameters
                if self.added.keys() <= names.keys():
                    yield kind, "__init__"

    def more(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        chosen = any(arguments.get(name) is not None for name in ("fused", "foreach"))
        return {} if chosen else self.added


class Foreach(Fused):
    """Updates the parameters in few calls."""

    added: ClassVar[dict[str, Any]] = {"foreach": True}


class SetToNone(Arguments):
    """Frees gradients, where the script fills them with zeros."""

    owners = ((Optimizer, "zero_grad"), (torch.nn.Module, "zero_grad"))

    def _call(self, original: Any, *arguments: Any, **keywords: Any) -> Any:
        if keywords.get("set_to_none") is False and (place := line_of(sys._getframe(2))):
            self.places[place] = {"zero_grad": {"set_to_none": True}}
        return original(*arguments[:1], set_to_none=True)


class BucketView(Arguments):
    owners = ((DistributedDataParallel, "__init__"),)
    added: ClassVar[dict[str, Any]] = {"gradient_as_bucket_view": True}


class BucketMegabytes(Arguments):
    """DDP reduces in buckets of the size that the value says."""

    owners = ((DistributedDataParallel, "__init__"),)

    def more(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        chosen = arguments.get("bucket_cap_mb") is not None
        return {} if chosen else {"bucket_cap_mb": int(self.value)}


class KeepUnsharded(Arguments):
    """Keeps parameters of FSDP2 whole between forward and backward pass."""

    owners = ((fsdp, "fully_shard"),)
    added: ClassVar[dict[str, Any]] = {"reshard_after_forward": False}
