"""Worker of FullyShardedDataParallel, whose parameters are slices of flat vectors."""

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

from shardmark.ranks.strategies.casting import lossless_copy
from shardmark.ranks.strategies.step import EagerWorker, loss_scaler

WRAPPED = "_fsdp_wrapped_module."
"""Part of the names of parameters and modules inside a wrapper."""


def without_shared_parameters(model: nn.Module, parts: Iterable[nn.Module]) -> set[nn.Module]:
    """Return the parts that share no parameter with the rest of the model.

    A shared parameter in two units would become two copies, so such parts stay in the root's unit.
    """
    uses = _uses(model)
    return {part for part in parts if _uses(part).items() <= uses.items()}


def _uses(module: nn.Module) -> Counter[int]:
    """Count the uses of each parameter, by its id."""
    return Counter(id(p) for _, p in module.named_parameters(remove_duplicate=False))


@dataclass(kw_only=True, eq=False)
class FullyShardedWorker(EagerWorker):
    """Trains with a slice of each parameter on each rank, in order of rank; slices may be empty."""

    shapes: Mapping[str, torch.Size]
    """Shapes of the full parameters by name."""
    reduces_each_pass: bool = False
    """True if micro-batches before the last one reduce gradients as well."""

    def __post_init__(self) -> None:
        assert isinstance(self.module, FullyShardedDataParallel)
        self._fsdp = self.module
        self._without_reduction = ExitStack()
        self.synchronise = None if self.reduces_each_pass else self._synchronise
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
        return {name: tensors[""] / scale for name, tensors in joined.items() if tensors}

    def full_optimizer_state(self) -> dict[str, dict[str, Tensor]]:
        state = self._optimizer.state
        return {name: self._joined(name, state.get(p, {})) for name, p in self._trained.items()}

    def _joined(self, name: str, slices: Mapping[str, object]) -> dict[str, Tensor]:
        """Join all ranks' slices of a parameter's tensors, by key; scalars stay as they are."""
        tensors = {k: lossless_copy(v) for k, v in slices.items() if isinstance(v, Tensor)}
        ranks = cast("list[dict[str, Tensor]]", self.group.gather(tensors))
        keys = dict.fromkeys(key for rank in ranks for key in rank)
        return {key: self._full(name, [r[key] for r in ranks if key in r]) for key in keys}

    def _full(self, name: str, slices: list[Tensor]) -> Tensor:
        if not slices[0].dim():
            return slices[0]
        return torch.cat([tensor.reshape(-1) for tensor in slices]).view(self.shapes[name])
