"""Which tensors of a traced step tensor parallel ranks would divide, and which each has whole."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from shardmark.core.layout import ActivationSharding
from shardmark.strategies.layers.divided import DIVIDED, placement_of

aten = torch.ops.aten
PRODUCTS = (aten.mm, aten.addmm, aten.bmm, aten.baddbmm)
Given = Sequence[Tensor]


class Division:
    """Follows storages from operation to operation, as the plan's layers are computed.

    A product with a divided weight makes divided activations of whole ones, and sums of them that
    are whole; everything else leaves them as they are.  With sequence parallelism what is whole
    between those layers is divided, too, but for what is gathered into a layer.

    Source: Shoeybi et al., arXiv:1909.08053, section 3; Korthikanti et al., MLSys 2023, section 4.
    """

    def __init__(self, styled: Iterable[tuple[nn.Module, str]], how: ActivationSharding) -> None:
        self._how = how
        self._parameters: set[int] = set()
        """Those of which a rank has a part."""
        self._styles: dict[int, str] = {}
        """Of weights that are divided, by storage; a cast one is divided like it."""
        self._shapes: set[tuple[int, ...]] = set()
        self._parts: set[int] = set()
        """Of which a rank has a part, by the layers."""
        self._logits: set[int] = set()
        """What is computed from gathered logits."""
        for module, style in styled:
            for name, parameter in module.named_parameters(recurse=False):
                if isinstance(placement_of(module, name, style), Shard):
                    self._parameters.add(id(parameter))
            weight = getattr(module, "weight", None)
            if style in DIVIDED and isinstance(weight, Tensor):
                self._shapes |= {tuple(weight.shape), tuple(weight.shape[::-1])}
                if isinstance(module, nn.Linear):
                    self._styles[_key(weight)] = style

    def replicated_fraction(self, parameters: Sequence[nn.Parameter]) -> float:
        """Share of them that each rank has whole."""
        whole = [each.numel() for each in parameters if id(each) not in self._parameters]
        return sum(whole) / max(1, sum(each.numel() for each in parameters))

    def forget(self, storage: int) -> None:
        """It was freed, and its number may be another's."""
        self._styles.pop(storage, None)
        self._parts.discard(storage)
        self._logits.discard(storage)

    def divides(self, tensor: Tensor) -> bool:
        """Whether a rank has a part of it alone."""
        key = _key(tensor)
        between = self._how.sequence_parallel and key not in self._logits
        return between or key in self._parts or key in self._styles

    def follow(
        self, packet: Any, given: Given, made: Given, *, backward: bool
    ) -> tuple[int, dict[int, int]]:
        """Bytes that messages of the operation take for a moment, whole; and by storage those that
        each rank has whole from now on, of what is made, and of what is gathered to be kept."""
        weights = [_key(each) for each in given if _key(each) in self._styles]
        others = [each for each in given if _key(each) not in self._styles]
        part = any(_key(each) in self._parts for each in others)
        logits = any(_key(each) in self._logits for each in others)
        moment, whole = 0, dict[int, int]()
        if weights and packet in PRODUCTS:
            style, reads_parts = self._styles[weights[0]], part
            makes_whole_logits = style == "gathered" and not self._how.loss_parallel
            part = not reads_parts and not makes_whole_logits
            if makes_whole_logits:
                logits = not backward
            moment, whole = self._messages(style, others, made, reads_parts, backward)
        elif weights and not others:  # cast
            part = True
            self._styles |= {_key(each): self._styles[weights[0]] for each in made}  # or a view
        elif packet in PRODUCTS and backward:
            part = part or any(tuple(each.shape) in self._shapes for each in made)
        known = {_key(each) for each in given}
        for each in made:
            if (key := _key(each)) in known:
                continue  # a view
            if part:
                self._parts.add(key)
            if logits and not part:
                self._logits.add(key)
            if not self.divides(each):
                whole[key] = each.untyped_storage().nbytes()
        return moment, whole

    def _messages(
        self, style: str, others: Given, made: Given, reads_parts: bool, backward: bool
    ) -> tuple[int, dict[int, int]]:
        """Of a product with a divided weight, as `follow` gives them."""
        whole_logits = style == "gathered" and not self._how.loss_parallel
        sums = reads_parts or whole_logits
        gathers = not backward if whole_logits else not reads_parts
        moment = sum(each.nbytes for each in made) if sums else 0
        if not (self._how.sequence_parallel and gathers):
            return moment, {}
        entering = max(others, key=lambda each: each.nbytes)  # beside it may be a bias
        if backward or style == "row":
            return moment + entering.nbytes, {}
        return moment, {_key(entering): entering.untyped_storage().nbytes()}


def _key(tensor: Tensor) -> int:
    return id(tensor.untyped_storage())
