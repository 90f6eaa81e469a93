"""Adds arguments to calls of torch's classes, where the script gives none."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from functools import cache
from typing import Any, ClassVar

import torch
from torch.distributed import fsdp
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer
from torch.utils.data import DataLoader, IterableDataset

from shardmark.scripts.interventions.base import (
    Intervention,
    library_of,
    line_of,
    replace,
)

signature_of = cache(inspect.signature)  # some of the calls are made in every step

KINDS = [kind for kind in vars(torch.optim).values() if isinstance(kind, type)]
OPTIMIZERS = [kind for kind in KINDS if issubclass(kind, Optimizer)]


class Arguments(Intervention):
    """Adds keyword arguments to calls of functions, and notes the lines of the calls."""

    owners: ClassVar[tuple[tuple[Any, str], ...]] = ((DataLoader, "__init__"),)
    """Classes or modules with the names of their functions."""
    added: ClassVar[dict[str, Any]] = {}
    """Arguments with values; the type `int` stands for the intervention's own value."""
    excluded: ClassVar[tuple[str, ...]] = ()
    """Arguments beside which none is added."""
    changes = True
    """False to note the calls alone."""

    def install(self) -> None:
        self.places: dict[str, dict[str, dict[str, Any]]] = {}
        """Arguments by `FILE:LINE<LIBRARY` of the user's line and name of the class or function."""
        for owner, name in self.owners:
            replace(owner, name, self._call)

    def more(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return what is added to a call with these arguments."""
        if any(arguments.get(name) is not None for name in (*self.added, *self.excluded)):
            return {}
        return {name: int(self.value) if v is int else v for name, v in self.added.items()}

    def _call(self, original: Any, *arguments: Any, **keywords: Any) -> Any:
        signature = signature_of(original)
        more = self.more(signature.bind(*arguments, **keywords).arguments)
        if more.keys() & signature.bind_partial(*arguments).arguments.keys():
            more = {}  # the script gives it by its place
        if more:
            named = type(arguments[0]) if original.__name__ == "__init__" else original
            frame = sys._getframe(2)
            place = f"{line_of(frame) or ''}<{library_of(frame)}"
            self.places.setdefault(place, {})[named.__name__] = more
        return original(*arguments, **{**keywords, **(more if self.changes else {})})

    def facts(self) -> dict[str, object]:
        return {"places": self.places} if self.places else {}


class Workers(Arguments):
    """Loads in as many processes as the value says, which live on."""

    def more(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        count, is_stream = int(self.value), isinstance(arguments["dataset"], IterableDataset)
        if is_stream or (arguments.get("num_workers") or 0) >= count:
            return {}
        return {"num_workers": count, "persistent_workers": True}


class Prefetch(Arguments):
    """Each worker loads as many batches ahead as the value says."""

    added: ClassVar[dict[str, Any]] = {"prefetch_factor": int}

    def more(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        return super().more(arguments) if arguments.get("num_workers") else {}


class PinMemory(Arguments):
    added: ClassVar[dict[str, Any]] = {"pin_memory": True}


class Fused(Arguments):
    """Updates all parameters in one kernel."""

    owners = tuple(
        (kind, "__init__") for kind in OPTIMIZERS if "fused" in inspect.signature(kind).parameters
    )
    added: ClassVar[dict[str, Any]] = {"fused": True}
    excluded = ("foreach",)


class Foreach(Arguments):
    """Updates the parameters in few calls."""

    owners = tuple(
        (kind, "__init__") for kind in OPTIMIZERS if "foreach" in inspect.signature(kind).parameters
    )
    added: ClassVar[dict[str, Any]] = {"foreach": True}
    excluded = ("fused",)


class SetToNone(Arguments):
    """Frees gradients, where the script fills them with zeros."""

    owners = ((Optimizer, "zero_grad"), (torch.nn.Module, "zero_grad"))

    def more(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        return {"set_to_none": True} if arguments.get("set_to_none") is False else {}


class BucketView(Arguments):
    owners = ((DistributedDataParallel, "__init__"),)
    added: ClassVar[dict[str, Any]] = {"gradient_as_bucket_view": True}


class BucketMb(BucketView):
    """DDP reduces in buckets of the size that the value says."""

    added: ClassVar[dict[str, Any]] = {"bucket_cap_mb": int}


class KeepUnsharded(Arguments):
    """Keeps parameters of FSDP2 whole between forward and backward pass."""

    owners = ((fsdp, "fully_shard"),)
    added: ClassVar[dict[str, Any]] = {"reshard_after_forward": False}
