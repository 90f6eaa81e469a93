"""Lets a step run without memory: fake tensors, and a GPU's kernels on any machine."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # torch has no public ones
from torch.nn import functional

from shardmark.base.traffic import ELEMENT_BYTES, stored_element_bytes
from shardmark.predict.trace.live_bytes import PLAIN, SEQUENCES
from shardmark.predict.trace.step_trace import WINDOW

DELTA_CHUNK = 64
"""Tokens that the kernels of linear attention take at once."""


class FastFakes(FakeTensorMode):  # type: ignore[no-untyped-call]  # torch's
    """Fake tensors whose results torch looks up by a key that is made in a fifth of the time."""

    def _cache_key(self, state: Any, func: Any, args: Any, kwargs: Any) -> Any:
        """Return a key of all that the sizes of a result depend on, or torch's own key."""
        values: list[Any] = [func, torch.get_default_dtype(), *kwargs]
        pending = [args, *kwargs.values()]
        while pending:
            value = pending.pop()
            kind = type(value)
            values.append(kind)
            is_plain = kind is FakeTensor and value.fake_mode is self and value.constant is None
            if is_plain and value.layout is torch.strided:
                values += (value.dtype, value.shape, value.stride(), value.storage_offset())
                values += (value.requires_grad, value.is_conj(), value.is_neg())
            elif kind in SEQUENCES:
                values.append(len(value))
                pending += value
            elif kind in PLAIN:
                values.append(value)
            else:
                return super()._cache_key(state, func, args, kwargs)
        return tuple(values)

    def _output_from_cache_entry(self, state: Any, entry: Any, key: Any, args: Any) -> Any:
        """Make the result again; torch's own way expects symbols and proxies."""
        (first, *_), metadata = entry.output_infos, entry.output_infos[0].metadata
        is_other = entry.is_output_tuple or metadata is None or first.inplace_idx is not None
        if is_other or metadata.is_conj or metadata.is_neg:
            return super()._output_from_cache_entry(state, entry, key, args)
        view = first.view_idx is not None
        sizes = ((), ()) if view else (metadata.shape, metadata.stride)
        empty = torch.empty_strided(*sizes, dtype=metadata.dtype, device="meta")
        if view:
            storage = args[first.view_idx].untyped_storage()
            empty.set_(storage, metadata.storage_offset, metadata.shape, metadata.stride)
        return FakeTensor(self, empty, metadata.device, requires_grad=metadata.requires_grad)


@contextmanager
def quiet() -> Iterator[None]:
    """Keep torch from printing the traceback of an operation that fake tensors refuse, and what
    its kernels for this machine warn of."""
    torch_logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, torch_logger.disabled = torch_logger.disabled, True
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"torch\.")
            yield
    finally:
        torch_logger.disabled = before


@contextmanager
def replaced(owners: Iterable[object], name: str, value: object) -> Iterator[None]:
    """Replace an attribute of the objects that have it inside of the block."""
    originals = [(owner, getattr(owner, name)) for owner in owners if hasattr(owner, name)]
    for owner, _ in originals:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, original in originals:
            setattr(owner, name, original)


@contextmanager
def unpacked() -> Iterator[None]:
    """Keep transformers from masking attention for samples that could be packed, and from caching.

    On fake tensors it cannot look; in a real step it finds one sample and uses causal kernels.
    Packed documents have a mask of their own.  A later real step would get fakes from the cache.
    """
    masking, caches = map(
        sys.modules.get, ("transformers.masking_utils", "transformers.pytorch_utils")
    )
    one_sample = replaced([masking], "find_packed_sequence_indices", lambda *_, **__: None)
    with one_sample, replaced([caches], "is_torchdynamo_compiling", lambda: True):
        yield


def delta_rules(model: nn.Module) -> AbstractContextManager[None]:
    """Trace linear attention by products of chunks, as its kernels compute it on GPUs.

    Without them transformers goes through the chunks one by one.
    """
    modules = {sys.modules[type(module).__module__] for module in model.modules()}
    return replaced(modules, "torch_chunk_gated_delta_rule", _chunk_products)


def _chunk_products(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **_: Any
) -> tuple[Tensor, None]:
    """Return an output of as many products as the gated delta rule has, and no state."""
    heads, length = value.shape[2], value.shape[1]
    inputs = (query, key, value * (beta * g.to(value.dtype))[..., None])
    padded = (functional.pad(one, (0, 0, 0, 0, 0, -length % DELTA_CHUNK)) for one in inputs)
    of_heads = (one.repeat_interleave(heads // one.shape[2], dim=2) for one in padded)
    query, key, value = (
        torch.unflatten(one.transpose(1, 2), 2, (-1, DELTA_CHUNK)) for one in of_heads
    )
    within, states = key @ key.mT, key.mT @ value
    changed = within @ value - (within @ key) @ states
    output = query @ states + (query @ key.mT) @ changed
    return output.flatten(2, 3).transpose(1, 2)[:, :length], None


@contextmanager
def routed_experts(model: nn.Module) -> Iterator[None]:
    """Trace experts that compute the tokens sent to them, as programs with grouped products do.

    The experts of Llama 4 in transformers compute all tokens.
    """
    layers = [m for m in model.modules() if type(m).__name__ == "Llama4TextMoe"]
    for layer in layers:
        layer.forward = partial(_of_sent_tokens, layer)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def _of_sent_tokens(layer: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output of a layer of experts that all get equally many tokens."""
    hidden = hidden.reshape(-1, layer.hidden_dim)
    scores, logits = layer.router(hidden)
    sent = hidden.repeat(layer.top_k, 1) * scores[:, : layer.top_k].mT.reshape(-1, 1)
    padded = functional.pad(sent, (0, 0, 0, -len(sent) % layer.num_experts))
    computed = layer.experts(padded)[: len(sent)].unflatten(0, (layer.top_k, -1))
    return layer.shared_expert(hidden) + computed.sum(dim=0), logits


@contextmanager
def flash_attention() -> Iterator[None]:
    """Trace attention of transformers as its FlashAttention: windows, and no masks in memory.

    The library itself need not be installed.  Its kernels skip what lies outside of a window; those
    of torch compute everything under an explicit mask.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    mappings = AttentionInterface._global_mapping, AttentionMaskInterface._global_mapping
    originals = [dict(mapping) for mapping in mappings]
    for name in ("sdpa", "eager"):
        AttentionInterface.register(name, partial(_windowed, originals[0]["sdpa"]))
        AttentionMaskInterface.register(name, originals[1]["flash_attention_2"])
    try:
        yield
    finally:
        for mapping, original in zip(mappings, originals, strict=True):
            mapping.clear()
            mapping.update(original)


def _windowed(
    attend: Callable[..., Any],
    *tensors: Any,
    sliding_window: int | None = None,
    softcap: float | None = None,  # noqa: ARG001  (it moves no bytes)
    **options: Any,
) -> Any:
    token = WINDOW.set(sliding_window)
    try:
        return attend(*tensors, **options)
    finally:
        WINDOW.reset(token)


@contextmanager
def gpu_kernels() -> Iterator[None]:
    """Trace attention as one fused kernel, and dropout with masks of one byte for each value.

    A CPU's kernels decompose the first, and save factors for the second.
    """
    attention = functional.scaled_dot_product_attention

    def fused(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,  # noqa: ARG001
        *causal: bool,
        **others: Any,
    ) -> Tensor:
        return attention(query, key, value, attn_mask, 0.0, *causal, **others)

    def masked(
        input: Tensor,  # noqa: A002
        p: float = 0.5,
        training: bool = True,
        inplace: bool = False,  # noqa: ARG001
    ) -> Tensor:
        return torch.native_dropout(input, p, True)[0] if training and p else input

    fused_attention = replaced([functional], "scaled_dot_product_attention", fused)
    with fused_attention, replaced([functional], "dropout", masked):
        yield


def make_fake(model: nn.Module, fake: FakeTensorMode, casts: torch.dtype | None) -> None:
    """Replace parameters and buffers, in place, by fake tensors; tied ones stay tied."""
    fakes: dict[int, Any] = {}

    def converted(tensor: Tensor) -> Any:
        if id(tensor) not in fakes:
            is_cast = isinstance(tensor, nn.Parameter) and tensor.is_floating_point()
            dtype = casts if casts is not None and is_cast else tensor.dtype
            with fake:
                empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype)
            trained = tensor.requires_grad
            fakes[id(tensor)] = (
                nn.Parameter(empty, requires_grad=trained)
                if isinstance(tensor, nn.Parameter)
                else empty
            )
            setattr(fakes[id(tensor)], ELEMENT_BYTES, stored_element_bytes(tensor))
        return fakes[id(tensor)]

    originals = [*model.parameters(), *model.buffers()]  # alive, so that no other gets their id
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    tensors[name] = converted(tensor)
    del originals
