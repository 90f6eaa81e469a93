"""A task whose model does not fit into the memory that a rank may take."""

from __future__ import annotations

import ctypes
import os
import resource

import psutil
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

M_MMAP_THRESHOLD = -3
WIDTH = 2048
BLOCKS = 6
MODEL_BYTES = 4 * BLOCKS * (WIDTH * WIDTH + WIDTH)
"""101 MB."""
COPIES = 3.0
"""`ddp` holds four: parameters, gradients and two states of Adam."""


class Task:
    def __init__(self) -> None:
        if "RANK" in os.environ:
            # Else glibc keeps what was freed: that would be counted, too.
            ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**20)
            held = psutil.Process().memory_info().data
            most = held + round(COPIES * MODEL_BYTES)
            resource.setrlimit(resource.RLIMIT_DATA, (most, most))
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(64, 8, generator=generator)
        self.data = TensorDataset(inputs, inputs.sum(1))

    def model(self) -> nn.Module:
        blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(BLOCKS)]
        return nn.Sequential(nn.Linear(8, WIDTH), *blocks, nn.Linear(WIDTH, 1), nn.Flatten(0))

    def train_data(self) -> TensorDataset:
        return self.data

    def validation_data(self) -> TensorDataset:
        return TensorDataset(*(tensor[:8] for tensor in self.data.tensors))

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, targets = batch
        return functional.mse_loss(model(inputs), targets)
