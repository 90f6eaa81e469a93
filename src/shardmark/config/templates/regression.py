"""Predict the progress of a disease from ten measurements (scikit-learn's diabetes data)."""

import torch
from sklearn.datasets import load_diabetes
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset


class Task:
    def __init__(self, width=64):
        self.width = width
        self.better = {"rmse": "lower"}  # for `compare --view time-to:rmse`
        data = load_diabetes()
        inputs = torch.tensor(data.data, dtype=torch.float32) * 20
        targets = torch.tensor(data.target, dtype=torch.float32) / 100
        self.train, self.test = (
            TensorDataset(inputs[rows], targets[rows]) for rows in (slice(0, 384), slice(384, 442))
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
