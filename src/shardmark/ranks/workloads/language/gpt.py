"""A small transformer with GPT-2's blocks, as a decoder or an encoder.  Imports torch."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

TENSOR_PLAN = {
    "embedding": "row",
    "blocks.*.attention.queries_keys_values": "column",
    "blocks.*.attention.out": "row",
    "blocks.*.widen": "column",
    "blocks.*.shrink": "row",
    "head": "gathered",
}
"""Tensor-parallel style of each layer; see `TensorPlan`."""
FULL_SEQUENCES = {
    "blocks.*.attention.queries_keys_values": "after",
    "blocks.*.attention.out": "before",
}
"""Layers between which sequences are full, rotary positions included; see `exchanging`."""


class GPT(nn.Module):
    """A transformer of pre-norm blocks between an embedding and a head (Radford et al., 2019).

    With learned positions, a tied head and 12 layers of width 768 it is GPT-2, 124 M parameters.
    """

    def __init__(
        self,
        *,
        vocabulary: int,
        sequence_length: int,
        layers: int,
        width: int,
        heads: int,
        rotary: bool = True,
        tied: bool = True,
        dropout: float = 0.0,
        causal: bool = True,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.positions = None if rotary else nn.Embedding(sequence_length, width)
        self.dropout = nn.Dropout(dropout)
        turns = Rotation(sequence_length, width // heads) if rotary else None
        self.blocks = nn.ModuleList(
            Block(width, heads, dropout=dropout, causal=causal, turns=turns) for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.apply(_initialise)
        for block in self.blocks:
            for last in (block.attention.out, block.shrink):  # type: ignore[union-attr]
                nn.init.normal_(last.weight, std=0.02 / (2 * layers) ** 0.5)  # type: ignore[arg-type, union-attr]
        if tied:
            self.head.weight = self.embedding.weight

    def forward(
        self, tokens: Tensor, documents: Tensor | None = None, positions: Tensor | None = None
    ) -> Tensor:
        """Compute logits (batch, length, vocabulary) of tokens (batch, length).

        `documents`, with the shape of the full sequences, restricts attention to equal numbers.
        `positions`, with the shape of the tokens, are needed if these are a part of the sequences.
        """
        hidden = embed(self, tokens, documents, positions)
        allowed = None if documents is None else same_document(documents)
        for block in self.blocks:
            hidden = block(hidden, allowed)
        logits: Tensor = self.head(self.norm(hidden))
        return logits


def embed(
    module: GPT | Embeddings,
    tokens: Tensor,
    documents: Tensor | None,
    positions: Tensor | None = None,
) -> Tensor:
    """Embed tokens (batch, length) to (batch, length, width)."""
    hidden: Tensor = module.embedding(tokens)
    if module.positions is not None:
        indices = positions_in(tokens, documents) if positions is None else positions
        hidden = hidden + module.positions(indices)
    dropped: Tensor = module.dropout(hidden)
    return dropped


class Block(nn.Module):
    """A pre-norm transformer block: attention and an MLP with residual connections."""

    def __init__(
        self, width: int, heads: int, *, dropout: float, causal: bool, turns: Rotation | None
    ) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout=dropout, causal=causal, turns=turns)
        self.norm = nn.LayerNorm(width)
        self.widen = nn.Linear(width, 4 * width)
        self.shrink = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor, allowed: Tensor | None) -> Tensor:
        attended = self.attention(self.attention_norm(hidden), allowed)
        hidden = hidden + self.dropout(attended)
        widened = functional.gelu(self.widen(self.norm(hidden)), approximate="tanh")
        out: Tensor = hidden + self.dropout(self.shrink(widened))
        return out


class Attention(nn.Module):
    """Multi-head scaled dot-product attention.

    Rows of the projection are ordered by head, then queries, keys and values: a tensor-parallel
    rank can hold the rows of some heads.
    """

    def __init__(
        self, width: int, heads: int, *, dropout: float, causal: bool, turns: Rotation | None
    ) -> None:
        super().__init__()
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self._size = width // heads
        self._dropout, self._causal, self._turns = dropout, causal, turns

    def forward(self, hidden: Tensor, allowed: Tensor | None) -> Tensor:
        projected = self.queries_keys_values(hidden)  # (batch, length, heads x 3 x size)
        batch, length, _ = projected.shape
        heads = projected.view(batch, length, -1, 3, self._size)
        queries, keys, values = heads.permute(3, 0, 2, 1, 4)  # (batch, heads, length, size)
        if self._turns is not None:
            queries, keys = self._turns(queries), self._turns(keys)
        if allowed is not None and self._causal:
            allowed = allowed.tril()
        mixed = functional.scaled_dot_product_attention(
            queries,
            keys,
            values,
            attn_mask=allowed,
            dropout_p=self._dropout if self.training else 0.0,
            is_causal=self._causal and allowed is None,
        )
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, -1))
        return out


class Rotation(nn.Module):
    """Rotary position embedding: rotates pairs of channels by an angle that grows with position.

    Source: Su et al., arXiv 2104.09864, with the halves of a head as pairs, like Llama.
    """

    cosines: Tensor
    sines: Tensor

    def __init__(self, length: int, channels: int) -> None:
        super().__init__()
        frequencies = 10_000.0 ** (-torch.arange(0, channels, 2) / channels)
        angles = torch.outer(torch.arange(length), frequencies).repeat(1, 2)  # (length, channels)
        self.register_buffer("cosines", angles.cos(), persistent=False)
        self.register_buffer("sines", angles.sin(), persistent=False)

    def forward(self, heads: Tensor) -> Tensor:
        """Rotate heads (batch, heads, length, channels) in fp32; the result has their type."""
        length = heads.shape[-2]
        first, second = heads.float().chunk(2, dim=-1)
        crossed = torch.cat((-second, first), dim=-1) * self.sines[:length]
        return (heads * self.cosines[:length] + crossed).type_as(heads)


StageOutput = Tensor | tuple[Tensor, Tensor]
"""Output of a pipeline part: the hidden state, and the documents if there are any."""


def parts_of(model: GPT) -> list[nn.Module]:
    """Cut the model into parts that compute it when called in a row."""
    return [Embeddings(model), *map(Layer, model.blocks), Head(model)]


class Embeddings(nn.Module):
    """The first pipeline part."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.embedding, self.positions = model.embedding, model.positions
        self.dropout = model.dropout

    def forward(self, tokens: Tensor, documents: Tensor | None = None) -> StageOutput:
        hidden = embed(self, tokens, documents)
        return hidden if documents is None else (hidden, documents)


class Layer(nn.Module):
    """A block that computes its mask from the documents: masks are larger to send."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, hidden: Tensor, documents: Tensor | None = None) -> StageOutput:
        out: Tensor = self.block(hidden, None if documents is None else same_document(documents))
        return out if documents is None else (out, documents)


class Head(nn.Module):
    """The last pipeline part."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.norm, self.head = model.norm, model.head

    def forward(self, hidden: Tensor, documents: Tensor | None = None) -> Tensor:  # noqa: ARG002
        logits: Tensor = self.head(self.norm(hidden))
        return logits


def positions_in(tokens: Tensor, documents: Tensor | None) -> Tensor:
    """Position of each token in its sequence, (length,), or in its document, (batch, length)."""
    positions = torch.arange(tokens.shape[1], device=tokens.device)
    if documents is None:
        return positions
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return positions - (positions * begins).cummax(dim=1).values


def same_document(documents: Tensor) -> Tensor:
    """Mask (batch, 1, length, length), true for two tokens of the same document."""
    return (documents[:, :, None] == documents[:, None, :]).unsqueeze(1)


def _initialise(module: nn.Module) -> None:
    """Initialise like GPT-2: small normal weights, biases of zero."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
