"""A task of a user's own, for `predict_memory.py`: residual layers with dropout squeeze noise."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

WIDTH, SQUEEZED, LAYERS = 768, 384, 4
SAMPLES = 512


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, SQUEEZED), nn.SiLU(), nn.Linear(SQUEEZED, WIDTH)
        )
        self.dropout = nn.Dropout(0.1)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + self.dropout(self.layers(inputs))


class Task:
    def model(self) -> nn.Module:
        return nn.Sequential(*(Layer() for _ in range(LAYERS)), nn.Linear(WIDTH, WIDTH))

    def train_data(self) -> TensorDataset:
        return TensorDataset(torch.randn(SAMPLES, 32, WIDTH, generator=torch.Generator()))

    validation_data = train_data

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Tensor:
        (inputs,) = batch
        return nn.functional.mse_loss(model(inputs), inputs)

    def blocks(self, model: nn.Sequential) -> list[nn.Module]:
        return list(model)[:-1]
