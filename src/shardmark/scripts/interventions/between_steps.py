"""Takes away what lies between the steps: update, evaluation, checkpoints and prints."""

from __future__ import annotations

import builtins
import logging
import sys
from collections.abc import Callable
from itertools import repeat
from pathlib import Path
from typing import Any

import torch
from torch import TypedStorage, UntypedStorage, nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.data.dataloader import _BaseDataLoaderIter

from shardmark.scripts.interventions.base import NAMES, Intervention, replace
from shardmark.scripts.interventions.same_batch import SameBatch


class NoUpdate(Intervention):
    """Optimizers find no gradients."""

    def begin(self) -> None:
        hidden: list[tuple[Any, Any]] = []

        def hide(optimizer: Optimizer, *_: Any) -> None:
            parameters = (p for group in optimizer.param_groups for p in group["params"])
            hidden[:] = [(p, p.grad) for p in parameters]
            for parameter, _ in hidden:
                parameter.grad = None

        def show(*_: Any) -> None:
            for parameter, gradient in hidden:
                parameter.grad = gradient
            hidden.clear()

        register_optimizer_step_pre_hook(hide)
        register_optimizer_step_post_hook(show)


class NoEvaluation(SameBatch):
    """Modules that evaluate return their first outputs, of one batch of their loader."""

    def install(self) -> None:
        super().install()
        outputs: dict[object, Any] = {}
        self.evaluated: set[int] = set()
        """Data sets without a backward pass after their batches."""
        trained: set[int] = set()
        """Data sets, and modules, that were trained."""
        last = [0]

        def batch(original: Callable[..., Any], iterator: Any) -> Any:
            last[0] = id(iterator._dataset)
            return original(iterator)

        def backward(original: Callable[..., Any], *arguments: Any, **keywords: Any) -> None:
            trained.add(last[0])
            original(*arguments, **keywords)

        def call(original: Callable[..., Any], module: Any, *inputs: Any, **more: Any) -> Any:
            if module.training and torch.is_grad_enabled():
                trained.add(id(module))
            if module.training or torch.is_grad_enabled() or id(module) not in trained:
                return original(module, *inputs, **more)  # a teacher's is no evaluation
            if last[0] not in trained:
                self.evaluated.add(last[0])
            shapes = [getattr(value, "shape", None) for value in (*inputs, *more.values())]
            key = (id(module), str(shapes))
            if key not in outputs or not self.begun:
                outputs[key] = original(module, *inputs, **more)
            return outputs[key]

        replace(_BaseDataLoaderIter, "__next__", batch)
        replace(torch.autograd, "backward", backward)
        replace(nn.Module, "__call__", call)

    def keep(self, source: object, batch: Any) -> None:
        if source in self.evaluated:
            self.again[source] = repeat(batch)

    def begin(self) -> None:
        self.begun = True


class NoCheckpoint(Intervention):
    """Nothing is saved."""

    def begin(self) -> None:
        def save(original: Callable[..., Any], obj: object, *rest: Any, **more: Any) -> None:
            place = next(iter((*rest, more.get("f") or more.get("filename"))))
            if isinstance(obj, UntypedStorage | TypedStorage):  # a tensor is pickled
                original(obj, *rest, **more)
            elif isinstance(place, str | Path):
                Path(place).touch()  # it may be given another name, when it is complete

        _replace_everywhere(torch, "save", save)
        _silence({"safetensors.torch": ("save_file", "save_model")}, save)
        _silence({"torch.distributed.checkpoint": ("save", "async_save", "save_state_dict")})


class NoLogging(Intervention):
    """Nothing is printed or tracked."""

    def begin(self) -> None:
        replace(builtins, "print", _do_nothing)
        replace(logging.Logger, "callHandlers", _do_nothing)
        for stream in (sys.stdout, sys.stderr):
            replace(stream, "write", lambda _, text: len(text))
        _silence(NAMES["trackers"])


def _do_nothing(*_: Any, **__: Any) -> None:
    """Do nothing."""


def _silence(functions: dict[str, Any], wrapper: Callable[..., Any] = _do_nothing) -> None:
    """Replace functions of modules, or of their classes, that the script has imported."""
    for place, names in functions.items():
        module, _, kind = place.partition(":")
        owner = sys.modules.get(module)
        if owner is not None and kind:
            owner = getattr(owner, kind, None)
        for name in names if owner is not None else ():
            if hasattr(owner, name):
                _replace_everywhere(owner, name, wrapper)


def _replace_everywhere(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Replace a function also where modules have imported it by name."""
    original = getattr(owner, name)
    replace(owner, name, wrapper)
    for module in [*sys.modules.values()]:
        names = getattr(module, "__dict__", {})
        for alias in [alias for alias, value in [*names.items()] if value is original]:
            names[alias] = getattr(owner, name)
