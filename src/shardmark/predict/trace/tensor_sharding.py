"""Follows through a traced step which tensors tensor parallelism shards or replicates."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from shardmark.base.layout import ActivationSharding
from shardmark.ranks.strategies.layers.divided import DIVIDED, placement_of

aten = torch.ops.aten
PRODUCTS = (aten.mm, aten.addmm, aten.bmm, aten.baddbmm)
Tensors = Sequence[Tensor]


class TensorSharding:
    """Follows storages from operation to operation, as the layers of a tensor plan are computed.

    A product with a sharded weight makes sharded activations from replicated ones, and replicated
    sums from sharded ones; other operations keep the placement.  With sequence parallelism,
    activations between those layers are sharded too, except those that a layer gathers.

    Source: Shoeybi et al., arXiv:1909.08053, section 3; Korthikanti et al., MLSys 2023, section 4.
    """

    def __init__(
        self, styled: Iterable[tuple[nn.Module, str]], activations: ActivationSharding
    ) -> None:
        self._activations = activations
        self._parameters: set[int] = set()
        """Parameters that are sharded."""
        self._styles: dict[int, str] = {}
        """Style of each sharded weight, by storage; a cast weight has the style of its source."""
        self._shapes: set[tuple[int, ...]] = set()
        self._sharded: set[int] = set()
        """Storages that layers have sharded."""
        self._logits: set[int] = set()
        """Storages computed from gathered logits."""
        for module, style in styled:
            for name, parameter in module.named_parameters(recurse=False):
                if isinstance(placement_of(module, name, style), Shard):
                    self._parameters.add(id(parameter))
            weight = getattr(module, "weight", None)
            if style in DIVIDED and isinstance(weight, Tensor):
                self._shapes |= {tuple(weight.shape), tuple(weight.shape[::-1])}
                if isinstance(module, nn.Linear):
                    self._styles[storage_key(weight)] = style

    def replicated_fraction(self, parameters: Sequence[nn.Parameter]) -> float:
        """Fraction of the parameters that every rank has in full."""
        replicated = [p.numel() for p in parameters if id(p) not in self._parameters]
        return sum(replicated) / max(1, sum(p.numel() for p in parameters))

    def forget(self, storage: int) -> None:
        """Remove a freed storage: another may get its number."""
        self._styles.pop(storage, None)
        self._sharded.discard(storage)
        self._logits.discard(storage)

    def is_sharded(self, tensor: Tensor) -> bool:
        """True if each rank has only a shard of the tensor."""
        key = storage_key(tensor)
        between_layers = self._activations.sequence_parallel and key not in self._logits
        return between_layers or key in self._sharded or key in self._styles

    def follow(
        self, packet: Any, read: Tensors, written: Tensors, *, backward: bool
    ) -> tuple[int, dict[int, int]]:
        """Record an operation, and return its full-size messages and replicated storages.

        The first is the bytes of messages that live only during the operation; the second is the
        bytes, by storage, that every rank holds in full from now on: written or gathered tensors.
        """
        weights = [storage_key(tensor) for tensor in read if storage_key(tensor) in self._styles]
        others = [tensor for tensor in read if storage_key(tensor) not in self._styles]
        sharded = any(storage_key(tensor) in self._sharded for tensor in others)
        logits = any(storage_key(tensor) in self._logits for tensor in others)
        message_bytes, replicated_bytes = 0, dict[int, int]()
        if weights and packet in PRODUCTS:
            style, reads_shards = self._styles[weights[0]], sharded
            gathers_logits = style == "gathered" and not self._activations.loss_parallel
            sharded = not reads_shards and not gathers_logits
            if gathers_logits:
                logits = not backward
            message_bytes, replicated_bytes = self._messages(
                style, others, written, reads_shards, backward
            )
        elif weights and not others:  # a cast or a view
            sharded = True
            self._styles |= {storage_key(tensor): self._styles[weights[0]] for tensor in written}
        elif packet in PRODUCTS and backward:
            sharded = sharded or any(tuple(t.shape) in self._shapes for t in written)
        read_keys = {storage_key(tensor) for tensor in read}
        for tensor in written:
            if (key := storage_key(tensor)) in read_keys:
                continue  # a view
            if sharded:
                self._sharded.add(key)
            if logits and not sharded:
                self._logits.add(key)
            if not self.is_sharded(tensor):
                replicated_bytes[key] = tensor.untyped_storage().nbytes()
        return message_bytes, replicated_bytes

    def _messages(
        self, style: str, others: Tensors, written: Tensors, reads_shards: bool, backward: bool
    ) -> tuple[int, dict[int, int]]:
        """Return what `follow` returns, for a product with a sharded weight."""
        gathers_logits = style == "gathered" and not self._activations.loss_parallel
        sums = reads_shards or gathers_logits
        gathers_input = not backward if gathers_logits else not reads_shards
        message_bytes = sum(tensor.nbytes for tensor in written) if sums else 0
        if not (self._activations.sequence_parallel and gathers_input):
            return message_bytes, {}
        layer_input = max(others, key=lambda tensor: tensor.nbytes)  # the other may be a bias
        if backward or style == "row":
            return message_bytes + layer_input.nbytes, {}
        return message_bytes, {storage_key(layer_input): layer_input.untyped_storage().nbytes()}


def storage_key(tensor: Tensor) -> int:
    return id(tensor.untyped_storage())
