"""A user's own model: small, with everything that makes strategies differ when they go wrong."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Block(nn.Module):
    """Batch norm (statistics by rank), dropout (draws by rank), a residual path."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.dropout = nn.Dropout(0.1)

    def forward(self, pictures: Tensor) -> Tensor:
        out: Tensor = pictures + self.dropout(torch.relu(self.norm(self.convolution(pictures))))
        return out


def small(num_classes: int) -> nn.Module:
    """A residual network of 3 blocks for any picture size."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=4, padding=1),
        nn.Sequential(*(Block(16) for _ in range(3))),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(64, num_classes),
    )
