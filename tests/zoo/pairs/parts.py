"""Model and data that the scripts of the pairs share."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

WORDS, WIDTH, LENGTH, SAMPLES = 40, 32, 10, 256
RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.names = {name: name for name in ("norm", "up", "down")}
        self.activation: Callable[[Tensor], Tensor] = torch.relu

    def rename(self) -> None:
        """Give the modules other names, and the opposite order."""
        for name in reversed(self.names):
            self.names[name] = f"layer_{name}"
            self.register_module(f"layer_{name}", self._modules.pop(name))

    def forward(self, hidden: Tensor) -> Tensor:
        norm, up, down = map(self.get_submodule, self.names.values())
        change: Tensor = self.dropout(down(self.activation(up(norm(hidden)))))
        return hidden + change


class Model(nn.Module):
    """Predicts the next word from the mean of the words before; its output weights are tied."""

    def __init__(self, dropout: float = 0.1, *, tied: bool = True) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList([Block(dropout), Block(dropout)])
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.words.weight
        else:
            self.head.weight = nn.Parameter(self.words.weight.detach().clone())

    def forward(self, inputs: Tensor) -> Tensor:
        counts = torch.arange(1, inputs.shape[1] + 1)[:, None]
        hidden = self.words(inputs).cumsum(1) / counts  # (batch, length, width)
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(hidden)
        return logits


def model(dropout: float = 0.1, *, tied: bool = True, seed: int = 0) -> Model:
    torch.manual_seed(seed)
    return Model(dropout, tied=tied)


def dataset(*, padded: bool = False) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(1, WORDS, (SAMPLES, LENGTH + 1), generator=generator)
    targets = tokens[:, 1:].clone()
    if padded:
        lengths = torch.randint(2, LENGTH + 1, (SAMPLES, 1), generator=generator)
        targets[torch.arange(LENGTH) >= lengths] = -100
    return TensorDataset(tokens[:, :-1], targets)


def loader(
    data: TensorDataset, batch: int, *, seed: int = 0, workers: int = 0
) -> DataLoader[tuple[Tensor, ...]]:
    """Batches of this rank; `batch` is its size on a rank."""
    sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(
        data, num_replicas=WORLD, rank=RANK, seed=seed
    )
    return DataLoader(data, batch, sampler=sampler, num_workers=workers)
