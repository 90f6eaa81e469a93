"""Operators of a script: its random numbers, and the tensors that depend on chosen ones."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._guards import detect_fake_mode  # torch.compile traces with tensors without values
from torch.multiprocessing.reductions import StorageWeakRef  # no address is used again meanwhile
from torch.utils._python_dispatch import TorchDispatchMode  # documented, but has no public name

from shardmark.scripts.full_tensors import is_distributed_tensor
from shardmark.scripts.interventions.base import is_users

PACKAGE = str(Path(__file__).parents[1])
TORCH = str(Path(torch.__file__).parent)
DATA = str(Path(TORCH) / "utils" / "data")
PROCESSES = str(Path(multiprocessing.__file__).parent)
OF_MODEL = "model: "
"""Begins the place of a draw in the constructor of a module."""


OVERWRITES = {"copy_", "fill_", "zero_", "normal_", "uniform_", "bernoulli_"}
"""Operators that read no value of their first argument."""
MOST_FOLLOWED = 4096
"""Number of tensors after which those that are gone are forgotten."""


class Flow:
    """Knows which tensors depend on chosen ones, by a name for each origin."""

    def __init__(self) -> None:
        self._origins: dict[StorageWeakRef, set[str]] = {}
        self._most = MOST_FOLLOWED
        self._named: dict[int, str] = {}

    def name_of(self, module: torch.nn.Module) -> str:
        """Name of an origin: the class of a module, with a number from the second one on."""
        kind = type(module).__name__
        if id(module) not in self._named:
            count = sum(name.partition("-")[0] == kind for name in self._named.values())
            self._named[id(module)] = f"{kind}-{count + 1}" if count else kind
        return self._named[id(module)]

    def origins(self, values: Sequence[Any]) -> set[str]:
        return set[str]().union(*(self._origins.get(s, ()) for s in _storages(values)))

    def note_call(self, name: str, values: Sequence[Any], result: Any) -> None:
        """Note an operator that was called; one without a result changes its first argument."""
        if not self._origins or name.startswith("new_") or name.endswith("_like"):
            return  # no value is read
        if name in OVERWRITES and _is_whole(values[0]):
            for storage in _storages(values[:1]):
                self._origins.pop(storage, None)
            values = values[1:]
        if origins := self.origins(values):
            self.add([values[0] if result is None else result], origins)

    def add(self, values: Sequence[Any], origins: set[str]) -> None:
        for storage in _storages(values):
            self._origins[storage] = self._origins.get(storage, set()) | origins
        if len(self._origins) > self._most:  # tensors of long ago
            living = {
                key: names
                for key, names in self._origins.items()
                if not key.expired()  # type: ignore[no-untyped-call]
            }
            self._origins = living
            self._most = max(MOST_FOLLOWED, 2 * len(self._origins))


def _is_whole(tensor: Any) -> bool:
    """True for a tensor with all values of its storage."""
    with suppress(NotImplementedError, RuntimeError):
        return bool(tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size())
    return False


def _storages(values: Sequence[Any]) -> list[StorageWeakRef]:
    storages = []
    for value in values:
        if isinstance(value, Tensor):
            with suppress(NotImplementedError, RuntimeError):  # sparse tensors have none
                storages.append(StorageWeakRef(value.untyped_storage()))  # type: ignore[no-untyped-call]
        elif isinstance(value, list | tuple):
            storages += _storages(value)
    return storages


class WatchDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Passes the result of every operator that draws random numbers to a function.

    `watch(place, result, own_seed)` returns the tensor to use, or None to use the result.
    `own_seed` is True if the script seeded these numbers after the initial weights.
    """

    def __init__(self, watch: Callable[[str, Tensor, bool], Tensor | None], flow: Flow) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._watch, self._flow = watch, flow
        self._own_seed = False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let torch compile beside this mode, which sees what compiled code draws."""
        return True

    def seeded(self, original: Callable[[int], torch.Generator], seed: int) -> torch.Generator:
        """Stand in the place of `torch.manual_seed`; libraries seed for whole programs."""
        self._own_seed = is_users(sys._getframe(2))  # the caller of what stands in the place
        return original(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        self._flow.note_call(name, (*args, *(kwargs or {}).values()), result)
        if torch.Tag.nondeterministic_seeded not in func.tags or detect_fake_mode((args, result)):
            return result
        if any(_is_no_draw(value) for value in (*args[:1], result)):
            self._own_seed = False
            return result
        place = user_place()
        if place is None:
            return result
        if name == "native_dropout":
            return self._dropout(place, args, result)
        if "scaled_dot_product" in name or not isinstance(result, Tensor):
            return result  # attention without dropout draws nothing
        generator = (kwargs or {}).get("generator") or torch.default_generator
        own_seed = self._own_seed or generator is not torch.default_generator
        value = self._watch(place, result, own_seed)
        return result if value is None else _replaced(result, value, in_place=name.endswith("_"))

    def _dropout(self, place: str, args: Any, result: Any) -> Any:
        """Dropout of a GPU, whose operator returns the mask too."""
        mask = result[1]
        value = self._watch(place, mask, self._own_seed)
        if value is None or value.shape != mask.shape:
            return result
        mask.copy_(value)
        return args[0] * mask / (1 - args[1]), mask


def _replaced(result: Tensor, value: Tensor, *, in_place: bool) -> Tensor:
    if value.shape == result.shape:
        return result.copy_(value)
    return result if in_place else value.to(result.device, result.dtype)


def _is_no_draw(value: Any) -> bool:
    """True for parameters, which initial weights are drawn for, and for sharded tensors."""
    return isinstance(value, Tensor) and (
        isinstance(value, torch.nn.Parameter) or value.is_meta or is_distributed_tensor(value)
    )


def user_place() -> str | None:
    """Lines of the script that lead to this call; None for a call from torch's data loaders."""
    places: list[str] = []
    of_model, frame = "", sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if frame.f_code.co_name == "__init__":
            made = frame.f_locals.get("self")
            of_model = OF_MODEL if isinstance(made, torch.nn.Module) else of_model
        if file.startswith(DATA):
            return None
        if not file.startswith((TORCH, PACKAGE, PROCESSES)):
            places.append(f"{Path(file).name}:{frame.f_lineno}")
        top = frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") == "__main__"
        if top or file.startswith(PROCESSES):
            break  # a replay in a fork has callers that the rank does not have
        frame = frame.f_back  # type: ignore[assignment]
    return of_model + " < ".join(places[:12])
