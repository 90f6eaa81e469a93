"""Hooks of torch that find the optimizer steps of a script, and mark the parts of each step."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.data.dataloader import _BaseDataLoaderIter

from shardmark.base.results.schema import Phase
from shardmark.ranks.measure.step.recorder import Recorder
from shardmark.scripts.interventions.base import replace

LOADER = "the batches of the script's DataLoader"


class Batches:
    """Counts samples and tokens of the batches that backward passes are taken of.

    A step has as many batches as backward passes, of those that one iterator gave with gradients
    enabled.  Batches that were loaded ahead are left for the next step.
    """

    def __init__(self) -> None:
        self._arrived: list[tuple[int, int]] = []
        """Samples and tokens of the batches of one iterator that no step has had."""
        self._iterator: object = None
        self._counts = (0, 0)
        """Counts of the last step."""
        self.passes = 0
        """Number of backward passes since the last step."""
        self.source: str | None = None
        """Description of the source of the batches; None before the first batch."""

    def arrived(self, batch: object, source: str, iterator: object = None) -> None:
        samples = samples_in(batch) if torch.is_grad_enabled() else None  # not of an evaluation
        if samples is None or self.source not in (None, source):
            return
        if iterator is not self._iterator:
            self._arrived.clear()
        self._arrived.append((samples, tokens_in(batch) or 0))
        self._iterator, self.source = iterator, source

    @property
    def workers(self) -> int:
        """Number of processes that load the batches."""
        return int(getattr(self._iterator, "_num_workers", 0))

    def take(self) -> tuple[int, int]:
        """Return samples and tokens of the step that ends now."""
        batches = self._arrived[: self.passes]
        if batches:  # otherwise as many as in the last step
            self._counts = sum(s for s, _ in batches), sum(t for _, t in batches)
        del self._arrived[: self.passes]
        self.passes = 0
        return self._counts


def samples_in(batch: object) -> int | None:
    """Number of samples of a batch, by its first tensor or its length; None if it has none."""
    if isinstance(batch, Tensor):
        return batch.shape[0] if batch.dim() else None
    if isinstance(batch, Mapping):
        sizes = (samples_in(value) for value in batch.values())
        return next((size for size in sizes if size is not None), None)
    if not isinstance(batch, list | tuple) or not batch:
        return None
    first = batch[0]
    if isinstance(first, Tensor):
        return samples_in(first)
    # Fields of samples (`zip(*samples)`) have equal types; a list of samples has mixed or mappings.
    fields = isinstance(first, list | tuple) and len({type(item) for item in first}) == 1
    return len(first) if fields else len(batch)


def tokens_in(batch: object) -> int | None:
    """Number of tokens of a batch that begins with an integer matrix and has no real numbers.

    Padding does not count if an `attention_mask` on the host marks it.
    """
    if isinstance(batch, Mapping):
        mask = batch.get("attention_mask")
        if isinstance(mask, Tensor) and mask.device.type == "cpu" and mask.dim() == 2:
            return int(mask.sum())
        batch = [value for value in batch.values() if isinstance(value, Tensor)]
    if not isinstance(batch, Tensor | list | tuple):
        return None
    items = [batch] if isinstance(batch, Tensor) else batch
    tensors = [item for item in items if isinstance(item, Tensor)]
    if any(tensor.is_floating_point() for tensor in tensors):
        return None
    return tensors[0].numel() if tensors and tensors[0].dim() == 2 else None


class StepHooks:
    """Records the steps of a script's first optimizer.  Reads no value from a device.

    `begin` makes the recorder at the first backward pass, which tells the device.  `stepped` is
    called after each step, and may raise to end the script.
    """

    def __init__(
        self, begin: Callable[[torch.device], Recorder], stepped: Callable[[], None]
    ) -> None:
        self._begin = begin
        self._stepped = stepped
        self._thread = threading.get_ident()
        self._recorder: Recorder | None = None
        self._optimizer: Optimizer | None = None
        self._depth = 0
        """Number of optimizer steps, one inside the other, that run."""
        self._update_started: object = None
        self._in_backward = False
        self.phase: Phase = "forward"
        """Phase of the step: `forward` up to a backward pass, `update` from there to the end."""
        self._losses: list[Tensor | None] = []
        """Losses of the backward passes since the last step."""
        self._unscaled: dict[int, Tensor] = {}
        """Losses before a scaler's factor, by the `id` of the scaled ones."""
        self.recording = True
        """False once no more steps are to be recorded; `stepped` is called after them, too."""
        self.batches = Batches()
        self.tokens: list[int] = []
        """Tokens of each step."""
        self.first_event_at_seconds: float | None = None
        """Unix time of the first batch or backward pass."""
        self._first_call = ExitStack()
        """Ends the wait for a module, in a script without a `DataLoader`."""

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Observe this process inside the block."""
        with ExitStack() as stack:
            for handle in (
                register_optimizer_step_pre_hook(self._update_begins),
                register_optimizer_step_post_hook(self._update_ends),
            ):
                stack.callback(handle.remove)
            for owner, name, wrapper in (
                (torch.autograd, "backward", self._backward),
                (_BaseDataLoaderIter, "__next__", self._next_batch),
                (torch.amp.GradScaler, "scale", self._scale),
            ):
                stack.callback(setattr, owner, name, getattr(owner, name))
                replace(owner, name, wrapper)
            stack.callback(self._first_call.close)
            yield

    def _next_batch(self, original: Callable[..., Any], loader: object) -> Any:
        self._note_time()
        on_thread = threading.get_ident() == self._thread
        if on_thread:
            self.phase = "forward"
        started = self._recorder.mark() if self._recorder and on_thread else None
        batch = original(loader)
        if self._recorder and on_thread:
            self._recorder.add_span("data", started)
        self.batches.arrived(batch, LOADER, loader)
        return batch

    def _note_time(self) -> None:
        if self.first_event_at_seconds is None:
            self.first_event_at_seconds = time.time()

    def _scale(self, original: Callable[..., Any], scaler: object, outputs: Any) -> Any:
        scaled = original(scaler, outputs)
        if isinstance(scaled, Tensor) and scaled.numel() == 1:
            self._unscaled = {id(scaled): outputs.detach().clone()}
        return scaled

    def _backward(self, original: Callable[..., Any], tensors: Any, *rest: Any, **more: Any) -> Any:
        if self._in_backward or threading.get_ident() != self._thread:
            return original(tensors, *rest, **more)  # a checkpoint's, or beside the training
        self._note_time()
        first = tensors if isinstance(tensors, Tensor) else next(iter(tensors), None)
        if self._recorder is None and isinstance(first, Tensor):
            self._recorder = self._begin(first.device)
            self._recorder.start_step()
        self.batches.passes += 1
        self._losses.append(self._loss(first))
        started = self._recorder.mark() if self._recorder else None
        self._in_backward, self.phase = True, "backward"
        try:
            return original(tensors, *rest, **more)
        finally:
            self._in_backward, self.phase = False, "update"
            if self._recorder:
                self._recorder.add_span("backward", started)
                self._update_started = self._recorder.mark()  # it may be inside of the step

    def _loss(self, tensor: object) -> Tensor | None:
        """Return the loss of a backward pass, without reading it; None if it is no single number.

        It is a copy: the script may change its own tensor afterwards.
        """
        if not isinstance(tensor, Tensor) or isinstance(tensor, DTensor) or tensor.numel() != 1:
            return None
        unscaled = self._unscaled.pop(id(tensor), None)
        return (tensor.detach().clone() if unscaled is None else unscaled).reshape(())

    def _update_begins(self, optimizer: Optimizer, *_: object) -> None:
        if self._optimizer is None:
            self._optimizer = optimizer
        self._depth += 1
        self.phase = "update"  # the next batch may have been loaded already
        if self._depth == 1 and self._recorder:
            self._update_started = self._recorder.mark()

    def _update_ends(self, optimizer: Optimizer, *_: object) -> None:
        self._depth = max(0, self._depth - 1)
        if self._recorder is None:
            return
        if self._depth == 0:
            self._recorder.add_span("optimizer", self._update_started)
        # Without a backward pass it updates another part of the parameters in the same step.
        if optimizer is self._optimizer and self._losses:
            self._end_step(self._recorder, optimizer)

    def _end_step(self, recorder: Recorder, optimizer: Optimizer) -> None:
        samples, tokens = self.batches.take()
        losses = [loss for loss in self._losses if loss is not None]
        complete = bool(losses) and len(losses) == len(self._losses)
        self._losses, self.phase = [], "forward"
        rate = optimizer.param_groups[0].get("lr", math.nan)
        on_device = isinstance(rate, Tensor) and rate.device.type != "cpu"
        if self.recording:
            self.tokens.append(tokens)
            recorder.end_step(
                sum(losses[1:], losses[0]) if complete else None,
                range(samples),
                None if on_device else float(rate),
            )
        if recorder.step == 1 and self.batches.source is None:
            # Not before: torch.compile compiles again for a hook of all modules.
            handle = register_module_forward_pre_hook(self._first_module)
            self._first_call.callback(handle.remove)
        self._stepped()
        recorder.start_step()

    def _first_module(self, module: nn.Module, _: object) -> None:
        """Watch the first module that is called for training, which is the outermost one."""
        if module.training and torch.is_grad_enabled():
            self._first_call.close()
            module.register_forward_pre_hook(self._module_called, with_kwargs=True)

    def _module_called(self, module: nn.Module, inputs: Any, keywords: Any) -> None:
        if module.training:
            batch = [value for value in (*inputs, *keywords.values()) if isinstance(value, Tensor)]
            self.batches.arrived(batch, f"the input of {type(module).__name__}")
