"""Predict a nonlinear function of ten numbers, of which five matter (Friedman, 1991)."""

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset


class Task:
    def __init__(self, width=64):
        self.width = width
        self.better = {"rmse": "lower"}  # used by `compare --view time-to:rmse`
        x = torch.rand(1280, 10, generator=torch.Generator().manual_seed(0))
        targets = (torch.pi * x[:, 0] * x[:, 1]).sin() + 2 * (x[:, 2] - 0.5) ** 2 + x[:, 3]
        self.train, self.test = (
            TensorDataset(x[rows], targets[rows] + 0.5 * x[rows, 4])
            for rows in (slice(0, 1024), slice(1024, 1280))
        )

    def model(self):
        hidden = [
            nn.Linear(10, self.width),
            nn.ReLU(),
            nn.Linear(self.width, self.width),
            nn.ReLU(),
        ]
        return nn.Sequential(*hidden, nn.Linear(self.width, 1), nn.Flatten(0))

    def train_data(self):
        return self.train

    def validation_data(self):
        return self.test

    def loss(self, model, batch):
        inputs, targets = batch
        return functional.mse_loss(model(inputs), targets)  # a mean: every sample weighs the same

    def evaluate(self, model, batch):
        inputs, targets = batch
        errors = model(inputs) - targets
        return {"squares": errors.square().sum(), "samples": len(targets)}

    def metrics(self, sums):
        return {"rmse": (sums["squares"] / sums["samples"]) ** 0.5}
