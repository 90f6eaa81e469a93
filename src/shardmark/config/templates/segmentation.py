"""Segment noisy images of digits (scikit-learn's digits, 8 x 8 pixels)."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional


class Pictures:
    def __init__(self, first, end):
        pictures = torch.tensor(load_digits().images[first:end], dtype=torch.float32) / 16
        self.pictures, self.masks = pictures[:, None], (pictures > 0.5).long()

    def __len__(self):
        return len(self.pictures)

    def __getitem__(self, index):  # the noise is seeded by epoch and sample, whoever reads it
        picture = self.pictures[index]
        return {"picture": picture + 0.3 * torch.randn_like(picture), "mask": self.masks[index]}


class Task:
    def model(self):
        def block():
            return nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU())

        return nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), block(), block(), nn.Conv2d(16, 2, 1))

    def train_data(self):
        return Pictures(0, 1536)

    def validation_data(self):
        return Pictures(1536, 1792)

    def loss(self, model, batch):
        logits = model(batch["picture"])  # (pictures, 2, 8, 8)
        cross_entropy = functional.cross_entropy(logits, batch["mask"])
        chances = logits.softmax(1)[:, 1].flatten(1)
        overlap = (chances * batch["mask"].flatten(1)).sum(1)
        dice = 1 - 2 * overlap / (chances.sum(1) + batch["mask"].flatten(1).sum(1))
        return cross_entropy + dice.mean()

    def evaluate(self, model, batch):
        predicted, mask = model(batch["picture"]).argmax(1) == 1, batch["mask"] == 1
        return {"both": (predicted & mask).sum(), "either": (predicted | mask).sum()}

    def metrics(self, sums):
        return {"iou": sums["both"] / sums["either"]}
