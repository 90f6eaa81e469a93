"""Follows which results of compiled code a step saves, and which it computes again."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor

from shardmark.predict.trace.live_bytes import LiveBytes
from shardmark.predict.trace.tensor_sharding import storage_key
from shardmark.predict.trace.unit_trace import UnitTrace


class CompiledCode:
    """Blocks that are compiled, or the full model: a compiler saves few of their results.

    It saves the results of products, and computes the others again in the backward pass.
    """

    def __init__(self, scope: str, live: LiveBytes) -> None:
        """`scope` is the recipe's `compile`; `live` counts the bytes of the step."""
        self._scope = scope
        self._live = live
        self._nodes: list[int] = []
        """Numbers of the autograd nodes at which a compiled model begins and ends."""
        self.recomputed: dict[int, int] = {}
        """Bytes, by storage, of results that are computed again instead of being saved."""
        self._saved_outputs: dict[int, list[Tensor]] = defaultdict(list)
        """Outputs of products, by the unit's position, from which the rest is computed again."""

    def note_node(self, *_: object) -> None:
        """Note the place in the forward pass where a compiled model begins or ends."""
        self._nodes.append(torch._C._autograd._get_sequence_nr())

    def includes(self, unit: UnitTrace, node: int, *, in_backward: bool) -> bool:
        """True for an operation of compiled code; `node` is that of the backward pass, or -1."""
        if self._scope != "model":
            return self._scope == "blocks" and unit.block
        if not in_backward:
            return len(self._nodes) == 1
        return bool(self._nodes) and self._nodes[0] <= node < self._nodes[-1]

    def leave_unsaved(self, results: Iterable[Tensor]) -> None:
        """Count no bytes for results that the backward pass computes again."""
        for tensor in results:
            if size := self._live.recount(storage_key(tensor), 0):
                self.recomputed[storage_key(tensor)] = size

    def save(self, results: Iterable[Tensor]) -> None:
        """Count results that leave compiled code, so that they are tensors in memory."""
        for tensor in results:
            if size := self.recomputed.pop(storage_key(tensor), 0):
                self._live.recount(storage_key(tensor), size)

    def save_outputs(self, at: int, outputs: Iterable[Tensor]) -> None:
        self._saved_outputs[at] += outputs

    def free_outputs_after(self, at: int) -> None:
        """Free what was saved for the backward passes of the units behind a position."""
        for later in [other for other in self._saved_outputs if other > at]:
            del self._saved_outputs[later]
