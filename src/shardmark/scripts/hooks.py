"""Hooks in a process of an audited script, which pass events to its observer."""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules import module as global_hooks
from torch.optim import optimizer as optimizers
from torch.utils.data import DataLoader

from shardmark.scripts.bootstrap.sitecustomize import AfterImport
from shardmark.scripts.draws import WatchDraws
from shardmark.scripts.epoch import EpochSkip
from shardmark.scripts.interventions import built, named_in
from shardmark.scripts.interventions.base import replace
from shardmark.scripts.recording import PROCESS_FILE, Plan

if TYPE_CHECKING:
    from shardmark.scripts.observer import Observer

LOSS_FUNCTIONS = (
    "cross_entropy",
    "nll_loss",
    "mse_loss",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "kl_div",
)

COLLECTIVES = (
    *("all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all"),
    *("all_to_all_single", "broadcast", "broadcast_object_list", "isend", "reduce"),
    *("reduce_scatter", "reduce_scatter_tensor", "send"),
)

LIGHTNING = {
    "lightning.pytorch.trainer.connectors.accelerator_connector": "_AcceleratorConnector",
    "pytorch_lightning.trainer.connectors.accelerator_connector": "_AcceleratorConnector",
    "lightning.fabric.connector": "_Connector",
    "lightning_fabric.connector": "_Connector",
}
"""Classes by module that get the argument `devices` of a Trainer or of Fabric."""

CLIPS = ("clip_grad_norm_", "clip_grad_value_")


def install() -> None:
    """Install all hooks; called once in every process, at the end of the import of torch."""
    plan = Plan.from_environment()
    module, _, name = plan.observer.partition(":")
    observer: Observer = getattr(importlib.import_module(module), name)(plan)
    for intervention in built(named_in(plan.interventions)):
        intervention.install()
    _watch_modules(observer)
    _watch_backward(observer)
    _watch_optimizers(observer)
    _watch_losses(observer)
    _watch_clipping(observer)
    _watch_scalers(observer)
    _watch_loaders(observer)
    _watch_collectives(observer)
    _set_devices_of_lightning()
    _refuse_spawn(observer)
    watch_exit(observer)
    if plan.until_epoch:
        EpochSkip(observer).install()

    def draw(place: str, value: Tensor, own_seed: bool) -> Tensor | None:
        return observer.draw(place, value, own_seed)  # `EpochSkip` replaces it

    draws = WatchDraws(draw)
    draws.__enter__()  # type: ignore[no-untyped-call]
    replace(torch, "manual_seed", draws.seeded)
    if not plan.replays and os.environ.get("RANK") == "0":
        _describe_process(Path(plan.directory) / PROCESS_FILE)


def _describe_process(path: Path) -> None:
    """Write how this interpreter was started, for the replays."""
    at_start = getattr(sys.modules.get("sitecustomize"), "AT_START", None)
    if at_start is not None and not path.exists():
        facts = {**at_start, "words": sys.orig_argv, "prefix": sys.prefix}
        path.write_text(json.dumps(facts))


def _watch_modules(observer: Observer) -> None:
    main = threading.main_thread()

    def before(module: nn.Module, _: Any) -> None:
        if threading.current_thread() is main:
            observer.before_module(module)

    def after(module: nn.Module, inputs: Any, keywords: Any, outputs: Any) -> None:
        if threading.current_thread() is main:
            observer.after_module(module, (inputs, keywords), outputs)

    global_hooks.register_module_forward_pre_hook(before)
    global_hooks.register_module_forward_hook(after, with_kwargs=True, always_call=True)


def _watch_backward(observer: Observer) -> None:
    original = torch.autograd.backward

    @functools.wraps(original)
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
        if observer.in_backward:  # checkpointing calls it inside of the script's call
            original(tensors, *args, **kwargs)
            return
        observer.before_backward(tensors, args[0] if args else kwargs.get("grad_tensors"))
        try:
            original(tensors, *args, **kwargs)
        finally:
            observer.after_backward()

    torch.autograd.backward = backward


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
    create = torch.optim.Optimizer.__init__

    @functools.wraps(create)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        create(self, *args, **kwargs)
        observer.optimizers.append(weakref.ref(self))

    torch.optim.Optimizer.__init__ = init  # type: ignore[method-assign]


def watch_deepspeed(observer: Observer, engine: type) -> None:
    """DeepSpeed's optimizers hold flat slices: its engine is watched in their place."""
    step = engine.step  # type: ignore[attr-defined]

    @functools.wraps(step)
    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        updates = self.is_gradient_accumulation_boundary()
        if updates:
            observer.before_step(self)
        result = step(self, *args, **kwargs)
        if updates:
            observer.after_step(self)
        return result

    engine.step = watched  # type: ignore[attr-defined]


def _watch_losses(observer: Observer) -> None:
    for name in LOSS_FUNCTIONS:
        original = getattr(functional, name)

        def watched(
            *args: Any,
            _name: str = name,
            _original: Callable[..., Tensor] = original,
            **kwargs: Any,
        ) -> Tensor:
            value = _original(*args, **kwargs)
            if value.requires_grad:
                named = inspect.signature(_original).bind(*args, **kwargs).arguments
                target = list(named.values())[1]
                plain = (float, int, str)
                options = {k: v for k, v in [*named.items()][2:] if isinstance(v, plain)}

                def of_row(row: int) -> Tensor:
                    rows = {name: named[name][row : row + 1] for name in list(named)[:2]}
                    return _original(**{**named, **rows, "reduction": "sum"})

                if named.get("weight") is not None:
                    target = None  # weights of classes: targets do not count alike
                observer.loss_called(_name, options, target, value, of_row)
            return value

        setattr(functional, name, functools.wraps(original)(watched))
    attention = functional.scaled_dot_product_attention

    @functools.wraps(attention)
    def without_dropout(*args: Any, **kwargs: Any) -> Tensor:
        """Fused attention draws its dropout where no hook sees it: both sides run without."""
        if len(args) > 4 and args[4]:
            args = (*args[:4], 0.0, *args[5:])
        return attention(*args, **kwargs | ({"dropout_p": 0.0} if "dropout_p" in kwargs else {}))

    functional.scaled_dot_product_attention = without_dropout


def _watch_clipping(observer: Observer) -> None:
    for name in CLIPS:
        original = getattr(nn.utils, name)

        def watched(*args: Any, _original: Any = original, **kwargs: Any) -> Any:
            call = inspect.signature(_original).bind(*args, **kwargs)
            parameters, limit, *_ = call.arguments.values()
            clipped = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            call.arguments["parameters"] = clipped  # an iterator can be read once
            observer.before_clip(clipped)
            norm = _original(*call.args, **call.kwargs)
            observer.after_clip(_original.__name__, norm, float(limit))
            return norm

        replaced = functools.wraps(original)(watched)
        setattr(nn.utils, name, replaced)
        setattr(nn.utils.clip_grad, name, replaced)


def _watch_scalers(observer: Observer) -> None:
    scaler = torch.amp.GradScaler
    scale, unscale, update = scaler.scale, scaler.unscale_, scaler.update

    @functools.wraps(scale)
    def scaled(self: Any, outputs: Any) -> Any:
        observer.scale = float(self.get_scale()) if self.is_enabled() else 1.0
        return scale(self, outputs)

    @functools.wraps(unscale)
    def unscaled(self: Any, optimizer: Any) -> None:
        unscale(self, optimizer)
        observer.unscaled = True

    @functools.wraps(update)
    def updated(self: Any, *args: Any, **kwargs: Any) -> None:
        update(self, *args, **kwargs)
        observer.begin_step()  # also after a step that the scaler skipped, for infinite gradients

    scaler.scale = scaled  # type: ignore[method-assign]
    scaler.unscale_ = unscaled  # type: ignore[method-assign]
    scaler.update = updated  # type: ignore[method-assign]


def _watch_loaders(observer: Observer) -> None:
    create, iterate, length = DataLoader.__init__, DataLoader.__iter__, DataLoader.__len__
    numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    @functools.wraps(create)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        create(self, *args, **kwargs)
        numbers[self] = len(numbers)

    @functools.wraps(iterate)
    def batches(self: Any) -> Iterator[Any]:
        return observer.batches(self, numbers.get(self, -1), lambda: iterate(self))

    @functools.wraps(length)
    def count(self: Any) -> int:
        return observer.length_of(numbers.get(self, -1), length(self))

    DataLoader.__init__ = init  # type: ignore[method-assign]
    DataLoader.__iter__ = batches  # type: ignore[assignment,method-assign]
    DataLoader.__len__ = count  # type: ignore[method-assign]


def _watch_collectives(observer: Observer) -> None:
    import torch.distributed as dist

    for name in COLLECTIVES:
        original = getattr(dist, name, None)
        if original is None:
            continue

        def watched(*args: Any, _original: Any = original, _name: str = name, **kwargs: Any) -> Any:
            observer.collective(_name, (*args, *kwargs.values()))
            return _original(*args, **kwargs)

        setattr(dist, name, functools.wraps(original)(watched))


def _set_devices_of_lightning() -> None:
    """Let Lightning use the launcher's ranks: it refuses another number than `devices`."""

    def replace(name: str, module: Any) -> None:
        connector = getattr(module, name)
        create = connector.__init__

        @functools.wraps(create)
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            if "LOCAL_WORLD_SIZE" in os.environ and "devices" in kwargs:
                kwargs["devices"] = int(os.environ["LOCAL_WORLD_SIZE"])
                if "LT_DEVICES" in os.environ:  # `fabric run` refuses two different numbers
                    os.environ["LT_DEVICES"] = os.environ["LOCAL_WORLD_SIZE"]
            create(self, *args, **kwargs)

        connector.__init__ = init

    calls = {module: functools.partial(replace, name) for module, name in LIGHTNING.items()}
    for module in sys.modules.keys() & calls.keys():
        calls.pop(module)(sys.modules[module])
    sys.meta_path.insert(0, AfterImport({**calls}))


def _refuse_spawn(observer: Observer) -> None:
    """Refuse a rank that starts ranks itself: their number does not follow from the launcher."""
    module: Any = torch.multiprocessing
    original = module.spawn

    @functools.wraps(original)
    def spawn(*args: Any, **kwargs: Any) -> Any:
        if "RANK" not in os.environ:
            return original(*args, **kwargs)
        observer.record.refusal = (
            "the script starts its ranks itself (torch.multiprocessing.spawn); let it take rank "
            "and world size from the environment, and start it by torchrun"
        )
        return observer.finish()

    module.spawn = spawn


def watch_exit(observer: Observer) -> None:
    """Write the record before the script ends its process by `os._exit`."""
    leave = os._exit

    @functools.wraps(leave)
    def exit_after_writing(status: int) -> NoReturn:
        observer.write()
        leave(status)

    os._exit = exit_after_writing
