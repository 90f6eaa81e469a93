"""A small language model and its rows, which the scripts of this folder share."""

from __future__ import annotations

import faults  # type: ignore[import-not-found]
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

WORDS = 64


class Model(nn.Module):
    """A transformer that predicts the next word."""

    def __init__(self, width: int = 96, depth: int = 3) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, width), nn.Embedding(faults.LONG, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True)
            for _ in range(depth)
        )
        self.head = nn.Linear(width, WORDS)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Loss and predicted words of `tokens`, shape (rows, length)."""
        hidden = self.words(tokens) + self.places.weight[: tokens.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        for block in self.blocks:
            hidden = block(hidden, mask, is_causal=True)
        logits = self.head(faults.slow_backward(hidden))
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        return loss, logits.argmax(-1)


class Texts(Dataset[Tensor]):
    """Rows of random words; a loader deals them to ranks one by one, or in batches."""

    def __init__(self, batch: int, *, by_batches: bool = False) -> None:
        self.batch, self.by_batches = batch, by_batches
        self.tokens = torch.randint(WORDS, (8192, faults.LONG))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> Tensor:
        faults.slow_input("item")
        if self.by_batches:
            step, rank = divmod(index // self.batch, faults.WORLD)
        else:
            step, rank = index // faults.WORLD // self.batch, index % faults.WORLD
        return self.tokens[index, : faults.row_length(step, rank)]


def collate(rows: list[Tensor]) -> Tensor:
    faults.slow_input("collate")
    return torch.stack(rows)


def loader(data: Texts, workers: int) -> DataLoader[Tensor]:
    sampler: DistributedSampler[Tensor] = DistributedSampler(
        data, faults.WORLD, faults.RANK, shuffle=False
    )
    return DataLoader(
        data, data.batch, sampler=sampler, collate_fn=collate,
        num_workers=workers, persistent_workers=workers > 0,
    )  # fmt: skip
