"""Hooks in a process of an audited script, which pass events to its observer."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import sys
import threading
import weakref
from collections.abc import Iterator
from multiprocessing import parent_process
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.func import debug_unwrap
from torch.nn import functional
from torch.nn.modules import module as global_hooks
from torch.optim import optimizer as optimizers
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from shardmark.scripts.draws import WatchDraws
from shardmark.scripts.epoch import EpochSkip
from shardmark.scripts.full_tensors import is_a
from shardmark.scripts.interventions import built, named_in
from shardmark.scripts.interventions.base import NAMES, is_users, line_of, replace
from shardmark.scripts.lightning import set_devices_of_lightning
from shardmark.scripts.recording import PROCESS_FILE, Plan

if TYPE_CHECKING:
    from shardmark.scripts.observer import Observer

LAUNCHED = "SHARDMARK_RANK_PROCESS"
"""Variable with the process that a launcher started, until it is in a process group."""


def install() -> None:
    """Install all hooks; called once in every process, at the end of the import of torch."""
    plan = Plan.from_environment()
    module, _, name = plan.observer.partition(":")
    observer: Observer = getattr(importlib.import_module(module), name)(plan)
    for intervention in built(named_in(plan.interventions)):
        intervention.install()
    for watch in (
        *(_watch_modules, _watch_backward, _watch_optimizers, _watch_losses, _watch_clipping),
        *(_watch_scalers, _watch_loaders, _watch_collectives, _watch_compiler, _refuse_own_ranks),
        watch_exit,
    ):
        watch(observer)
    set_devices_of_lightning()
    if plan.until_epoch:
        EpochSkip(observer).install()

    def draw(place: str, value: Tensor, own_seed: bool) -> Tensor | None:
        return observer.draw(place, value, own_seed)  # `EpochSkip` replaces it

    draws = WatchDraws(draw, observer.flow)
    draws.__enter__()  # type: ignore[no-untyped-call]
    replace(torch, "manual_seed", draws.seeded)
    if not plan.replays and os.environ.get("RANK") == "0":
        path = Path(plan.directory) / PROCESS_FILE
        at_start = getattr(sys.modules.get("sitecustomize"), "AT_START", None)
        if at_start is not None and not path.exists():
            facts = {**at_start, "words": sys.orig_argv, "prefix": sys.prefix}
            path.write_text(json.dumps(facts))  # the replays start as this interpreter was started


def _watch_modules(observer: Observer) -> None:
    main = threading.main_thread()

    def before(module: nn.Module, _: Any) -> None:
        if not is_compiling() and threading.current_thread() is main:
            observer.before_module(module)

    def after(module: nn.Module, inputs: Any, keywords: Any, outputs: Any) -> None:
        if not is_compiling() and threading.current_thread() is main:
            observer.after_module(module, (inputs, keywords), outputs)

    global_hooks.register_module_forward_pre_hook(before)
    global_hooks.register_module_forward_hook(after, with_kwargs=True, always_call=True)


def _watch_backward(observer: Observer) -> None:
    def backward(original: Any, tensors: Any, *args: Any, **kwargs: Any) -> None:
        if observer.in_backward:  # checkpointing calls it inside of the script's call
            original(tensors, *args, **kwargs)
            return
        observer.before_backward(tensors, args[0] if args else kwargs.get("grad_tensors"))
        try:
            original(tensors, *args, **kwargs)
        finally:
            observer.after_backward()

    replace(torch.autograd, "backward", backward)


def _watch_optimizers(observer: Observer) -> None:
    def before(optimizer: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        closure = kwargs.get("closure") if len(args) < 2 else args[1]  # args[0] is the optimizer
        if closure is None:
            observer.before_step(optimizer)
            return None

        def observed_closure() -> Any:
            """The optimizer computes the gradients itself: they are there when this returns."""
            result = closure()
            observer.before_step(optimizer)
            return result

        if len(args) < 2:
            return args, {**kwargs, "closure": observed_closure}
        return (args[0], observed_closure, *args[2:]), kwargs

    def after(optimizer: Any, _: Any, __: Any) -> None:
        observer.after_step(optimizer)

    optimizers.register_optimizer_step_pre_hook(before)
    optimizers.register_optimizer_step_post_hook(after)

    def create(original: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        original(optimizer, *args, **kwargs)
        observer.add_optimizer(optimizer)

    replace(torch.optim.Optimizer, "__init__", create)


def watch_deepspeed(observer: Observer, module: nn.Module) -> None:
    """DeepSpeed's optimizers hold flat slices: its engine is watched in their place."""
    engine = next((type(m) for m in module.modules() if is_a(m, "DeepSpeedEngine")), None)
    if engine is None or observer.engine is engine:
        return
    observer.engine = engine

    def step(original: Any, deepspeed: Any, *args: Any, **kwargs: Any) -> Any:
        updates = deepspeed.is_gradient_accumulation_boundary()
        if updates:
            observer.before_step(deepspeed)
        if observer.skips:  # its counters and rates go on
            result = None
            deepspeed.micro_steps += 1
            deepspeed.global_steps += updates
            if updates and deepspeed.lr_scheduler is not None:
                deepspeed.lr_scheduler.step()
        else:
            result = original(deepspeed, *args, **kwargs)
        if updates:
            observer.after_step(deepspeed)
        return result

    def backward(original: Any, deepspeed: Any, loss: Any, *args: Any, **kwargs: Any) -> Any:
        observer.loss_of_engine = loss
        if observer.skips:
            observer.after_backward()
            return loss
        return original(deepspeed, loss, *args, **kwargs)

    replace(engine, "step", step)
    replace(engine, "backward", backward)


def _watch_losses(observer: Observer) -> None:
    def loss(original: Any, *args: Any, **kwargs: Any) -> Tensor:
        value: Tensor = original(*args, **kwargs)
        has_numbers = not is_compiling() and debug_unwrap(value) is value  # not in torch.func
        if value.requires_grad and has_numbers:
            named = inspect.signature(original).bind(*args, **kwargs).arguments
            target = list(named.values())[1]
            plain = (float, int, str)
            options = {k: v for k, v in [*named.items()][2:] if isinstance(v, plain)}

            def of_row(row: int) -> Any:
                rows = {name: named[name][row : row + 1] for name in list(named)[:2]}
                return original(**{**named, **rows, "reduction": "sum"})

            if named.get("weight") is not None:
                target = None  # weights of classes: targets do not count alike
            observer.loss_called(original.__name__, options, target, value, of_row)
        return value

    def attention(original: Any, *args: Any, **kwargs: Any) -> Any:
        """Fused attention draws its dropout where no hook sees it: both sides run without."""
        if len(args) > 4 and args[4]:
            args = (*args[:4], 0.0, *args[5:])
        return original(*args, **kwargs | ({"dropout_p": 0.0} if "dropout_p" in kwargs else {}))

    for name in NAMES["loss_functions"]:
        replace(functional, name, loss)
    replace(functional, "scaled_dot_product_attention", attention)


def _watch_clipping(observer: Observer) -> None:
    def clip(original: Any, *args: Any, **kwargs: Any) -> Any:
        call = inspect.signature(original).bind(*args, **kwargs)
        parameters, limit, *_ = call.arguments.values()
        clipped = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        call.arguments["parameters"] = clipped  # an iterator can be read once
        observer.before_clip(clipped)
        norm = original(*call.args, **call.kwargs)
        observer.after_clip(original.__name__, norm, float(limit))
        return norm

    for name in ("clip_grad_norm_", "clip_grad_value_"):
        replace(nn.utils, name, clip)
        setattr(nn.utils.clip_grad, name, getattr(nn.utils, name))


def _watch_scalers(observer: Observer) -> None:
    def scale(original: Any, scaler: Any, outputs: Any) -> Any:
        observer.scale = float(scaler.get_scale()) if scaler.is_enabled() else 1.0
        return original(scaler, outputs)

    def unscale_(original: Any, scaler: Any, optimizer: Any) -> None:
        original(scaler, optimizer)
        observer.unscaled = True

    def update(original: Any, scaler: Any, *args: Any, **kwargs: Any) -> None:
        original(scaler, *args, **kwargs)
        observer.begin_step()  # also after a step that the scaler skipped, for infinite gradients

    for function in (scale, unscale_, update):
        replace(torch.amp.GradScaler, function.__name__, function)


def _watch_loaders(observer: Observer) -> None:
    numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def create(original: Any, loader: Any, *args: Any, **kwargs: Any) -> None:
        original(loader, *args, **kwargs)
        numbers[loader] = len(numbers)

    def batches(original: Any, loader: Any) -> Iterator[Any]:
        return observer.batches(loader, numbers.get(loader, -1), lambda: original(loader))

    def length(original: Any, loader: Any) -> int:
        return observer.length_of(numbers.get(loader, -1), original(loader))

    replace(DataLoader, "__init__", create)
    replace(DataLoader, "__iter__", batches)
    replace(DataLoader, "__len__", length)
    replace(_BaseDataLoaderIter, "_next_index", observer.next_index)


def _watch_collectives(observer: Observer) -> None:
    import torch.distributed as dist

    def collective(original: Any, *args: Any, **kwargs: Any) -> Any:
        observer.collective(original.__name__, (*args, *kwargs.values()))
        return original(*args, **kwargs)

    for name in NAMES["collectives"]:
        if hasattr(dist, name):
            replace(dist, name, collective)


def _watch_compiler(observer: Observer) -> None:
    def compile_(original: Any, *args: Any, **kwargs: Any) -> Any:
        frame = sys._getframe(2)
        if is_users(frame) or frame.f_code.co_name != "<module>":  # a library that is imported
            place = line_of(frame) or f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
            observer.record.compiled_at = observer.record.compiled_at or place
        return original(*args, **kwargs)

    replace(torch, "compile", compile_)


def _refuse_own_ranks(observer: Observer) -> None:
    """Refuse ranks that a rank of the launcher starts: their number does not follow from it."""
    if "RANK" in os.environ:
        os.environ.setdefault(LAUNCHED, str(os.getpid()))

    def join(original: Any, *args: Any, **kwargs: Any) -> Any:
        started_here = os.environ.get(LAUNCHED, str(os.getpid())) == str(os.getpid())
        if started_here or parent_process() is None:  # another command, as of accelerate launch
            os.environ.pop(LAUNCHED, None)  # its children may join groups of their own
            return original(*args, **kwargs)
        observer._process = os.getpid()
        observer.record.refusal = (
            "the script starts its ranks itself: write {ranks} in the command for their number, as "
            "in `python train.py --world-size {ranks}`"
        )
        return observer.finish()

    for module in (torch.distributed, torch.distributed.device_mesh):
        replace(module, "init_process_group", join)


def watch_exit(observer: Observer) -> None:
    """Write the record before the script ends its process by `os._exit`."""

    def leave(original: Any, status: int) -> None:
        observer.write()
        original(status)

    replace(os, "_exit", leave)
