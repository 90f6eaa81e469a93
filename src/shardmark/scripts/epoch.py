"""Skips the steps of the first epoch until its last window, at the price of loading its batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.utils._pytree as pytree  # torch has no public one
from torch import Tensor, nn

from shardmark.scripts.batches import copied, leaves
from shardmark.scripts.interventions.base import replace
from shardmark.scripts.record import Micro

if TYPE_CHECKING:
    from shardmark.scripts.observer import Observer

SILENT = (
    *("before_module", "after_module", "before_backward", "loss_called", "collective", "draw"),
    *("before_clip", "after_clip", "begin_step"),
)
"""Methods of the observer that do nothing while steps are skipped."""


class EpochSkip:
    """Gives the script its first batch again and again, and what its models returned for that.

    So its loop goes on as always, but nothing is computed and no weight changes.
    """

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._original = observer.batches
        self._outputs: dict[Any, Any] = {}
        self._current: Any = None
        """Iteration over a loader that gave the last batch."""
        self._stepped: Any = None
        """Iteration whose batch was the last one before an optimizer stepped."""
        self._ends = [0]
        """Number of batches that were loaded before each window."""
        self._micros = 0

    def install(self) -> None:
        self._observer.batches = self._batches  # type: ignore[method-assign]
        replace(nn.Module, "__call__", self._call)
        for name in ("step", "unscale_", "update"):
            replace(torch.amp.GradScaler, name, self._scale)

    def _call(
        self, original: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any
    ) -> Any:
        computes = not self._observer.skips or not torch.is_grad_enabled()
        if computes or next(module.parameters(), None) is None:
            return original(module, *args, **kwargs)
        key = (id(module), *(tuple(leaf.shape) for leaf in leaves((args, kwargs))))
        if key not in self._outputs:
            from shardmark.scripts.hooks import watch_deepspeed  # which imports this module

            watch_deepspeed(self._observer, module)
            # A pass without gradients would change what DDP does in its next one.
            self._observer.skips = False
            outputs = original(module, *args, **kwargs)
            self._observer.skips = True
            self._outputs[key] = pytree.tree_map(
                lambda v: v.detach() if isinstance(v, Tensor) else v, outputs
            )
        inputs = [v for v in pytree.tree_leaves((args, kwargs)) if isinstance(v, Tensor)]
        link = sum(v.sum() * 0 for v in inputs if v.requires_grad)

        def with_graph(value: Any) -> Any:
            """A tensor with a graph, so that the script can call `backward`."""
            real = isinstance(value, Tensor) and value.is_floating_point()
            return value.detach().requires_grad_() + link if real else value

        return pytree.tree_map(with_graph, self._outputs[key])

    def _scale(self, original: Callable[..., Any], scaler: Any, *args: Any, **kwargs: Any) -> Any:
        if not self._observer.skips:
            return original(scaler, *args, **kwargs)
        return args[0].step() if original.__name__ == "step" else None  # there are no gradients

    def _batches(
        self, loader: Any, number: int, iterate: Callable[[], Iterator[Any]]
    ) -> Iterator[Any]:
        def repeated() -> Iterator[Any]:
            first = None
            for batch in iterate():
                if first is None:
                    first = copied(batch)
                yield copied(first) if self._observer.skips else batch

        if self._observer.record.skipped is None:
            self._begin()
        iteration = self._original(loader, number, repeated)
        position = 0
        while True:
            if self._observer.skips and self._stepped is iteration:
                self._end_window(loader, position)
            self._current = iteration
            batch = next(iteration, self)
            if batch is self:
                return
            position += 1
            yield batch

    def _begin(self) -> None:
        observer = self._observer
        observer.skips, observer.record.skipped = True, 0
        observer.record.refusal = "the script ended before the last window of its first epoch"
        for name in SILENT:
            setattr(observer, name, lambda *_: None)
        observer.after_backward = self._count_backward  # type: ignore[method-assign]
        observer.before_step = self._leave_weights  # type: ignore[method-assign]
        observer.after_step = self._note_step  # type: ignore[assignment,method-assign]

    def _count_backward(self) -> None:
        self._micros += 1
        self._observer.record.backward_passes += 1

    def _leave_weights(self, optimizer: Any) -> None:
        """Take gradients away that no model gives, such as those of a tensor of the script."""
        groups = getattr(optimizer, "param_groups", ())  # DeepSpeed's engine has none
        for parameter in (p for group in groups for p in group["params"]):
            parameter.grad = None

    def _note_step(self, _: Any) -> None:
        window = self._observer.record.window
        self._observer.record.window, self._micros = max(window, self._micros), 0
        self._stepped = self._current

    def _end_window(self, loader: Any, position: int) -> None:
        """Decide, before the next batch is loaded, whether the last window begins."""
        record, of_ranks = self._observer.record, self._observer.skipped_by_ranks
        record.skipped, self._stepped = (record.skipped or 0) + 1, None
        self._ends.append(position)
        window = position - self._ends[-2]
        if self._ends[-2] == 0:
            window = min(window, record.window)
        ahead = self._ends[1] - window  # batches that a loader loads before they are used
        try:
            ends = len(loader) - position + ahead <= window if of_ranks is None else False
        except TypeError:
            self._refuse("--until-epoch needs a loader with a length, to know where an epoch ends")
        if ends or record.skipped == of_ranks:
            for name in (*SILENT, "after_backward", "before_step", "after_step"):
                delattr(self._observer, name)
            self._observer.skips, record.refusal, self._outputs = False, "", {}
            self._observer.begin_step()
            self._observer._micro = Micro()

    def _refuse(self, reason: str) -> None:
        self._observer.record.refusal = reason
        self._observer.finish()
