"""A worker on FullyShardedDataParallel, whose parameters are pieces of flat vectors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from shardmark.strategies.casting import lossless_copy
from shardmark.strategies.step import EagerWorker, loss_scaler

WRAPPED = "_fsdp_wrapped_module."
"""In the names of what is inside a wrapper."""


def unshared(model: nn.Module, parts: Iterable[nn.Module]) -> set[nn.Module]:
    """The parts without those that share a parameter with the rest of the model.

    In units of their own both would train a copy; these stay in the root's.
    """
    everywhere = _uses(model)
    return {part for part in parts if _uses(part).items() <= everywhere.items()}


def _uses(module: nn.Module) -> Counter[int]:
    """Of each parameter, by identity."""
    return Counter(id(p) for _, p in module.named_parameters(remove_duplicate=False))


@dataclass(kw_only=True, eq=False)
class FullyShardedWorker(EagerWorker):
    """Each rank has a piece of each parameter, in order of rank; a piece may be empty."""

    shapes: Mapping[str, torch.Size]
    """Of the whole parameters."""

    def __post_init__(self) -> None:
        assert isinstance(self.module, FullyShardedDataParallel)
        self._fsdp = self.module
        self._without_reduction = ExitStack()
        self.synchronise = self._synchronise
        super().__post_init__()

    def _sharded_units(self) -> dict[str, nn.Module]:
        return {n.replace(WRAPPED, ""): unit for n, unit in super()._sharded_units().items()}

    def _synchronise(self, last: bool) -> None:
        self._without_reduction.close()
        if not last:
            self._without_reduction.enter_context(self._fsdp.no_sync())

    def _named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in super()._named_parameters():
            yield name.replace(WRAPPED, ""), parameter

    def _built_scaler(self) -> torch.amp.GradScaler:
        return loss_scaler(self.recipe, self._parameters[0].device, ShardedGradScaler)

    def _clip(self, largest_norm: float) -> None:
        self._fsdp.clip_grad_norm_(largest_norm)

    def buffers(self) -> dict[str, Tensor]:
        return {name.replace(WRAPPED, ""): b for name, b in super().buffers().items()}

    def each_parameter(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in sorted(self._named_parameters()):
            yield name, self._joined(name, {"": parameter})[""]

    def full_gradients(self) -> dict[str, Tensor]:
        scale = self._scaler.get_scale()
        joined = {name: self._joined(name, {"": p.grad}) for name, p in self._trained.items()}
        return {name: whole[""] / scale for name, whole in joined.items() if whole}

    def full_optimizer_state(self) -> dict[str, dict[str, Tensor]]:
        state = self._optimizer.state
        return {name: self._joined(name, state.get(p, {})) for name, p in self._trained.items()}

    def _joined(self, name: str, pieces: Mapping[str, object]) -> dict[str, Tensor]:
        """What all ranks have of one parameter's tensors, by key; counts as they are."""
        own = {k: lossless_copy(v) for k, v in pieces.items() if isinstance(v, Tensor)}
        ranks = cast("list[dict[str, Tensor]]", self.group.gather(own))
        keys = dict.fromkeys(key for rank in ranks for key in rank)
        return {key: self._whole(name, [r[key] for r in ranks if key in r]) for key in keys}

    def _whole(self, name: str, pieces: list[Tensor]) -> Tensor:
        if not pieces[0].dim():
            return pieces[0]
        return torch.cat([piece.reshape(-1) for piece in pieces]).view(self.shapes[name])
