"""Segment discs in noisy images of 16 x 16 pixels."""

import torch
from torch import nn
from torch.nn import functional


class Images:
    def __init__(self, samples, seed):
        draws = torch.rand(3, samples, 1, 1, generator=torch.Generator().manual_seed(seed))
        rows, columns, radii = 4 + 8 * draws[0], 4 + 8 * draws[1], 2 + 3 * draws[2]
        pixels = torch.arange(16.0)
        distances = (pixels[:, None] - rows) ** 2 + (pixels - columns) ** 2
        self.masks = (distances < radii**2).long()  # (samples, 16, 16)

    def __len__(self):
        return len(self.masks)

    def __getitem__(self, index):  # the noise is seeded by epoch and sample, on whichever rank
        mask = self.masks[index]
        return {"image": mask[None] + 0.5 * torch.randn(1, 16, 16), "mask": mask}


class Task:
    def model(self):
        def block():
            return nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU())

        return nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), block(), block(), nn.Conv2d(16, 2, 1))

    def train_data(self):
        return Images(1536, seed=0)

    def validation_data(self):
        return Images(256, seed=1)

    def loss(self, model, batch):
        logits = model(batch["image"])  # (images, 2, 16, 16)
        cross_entropy = functional.cross_entropy(logits, batch["mask"])
        chances = logits.softmax(1)[:, 1].flatten(1)
        overlap = (chances * batch["mask"].flatten(1)).sum(1)
        dice = 1 - 2 * overlap / (chances.sum(1) + batch["mask"].flatten(1).sum(1))
        return cross_entropy + dice.mean()

    def evaluate(self, model, batch):
        predicted, mask = model(batch["image"]).argmax(1) == 1, batch["mask"] == 1
        return {"both": (predicted & mask).sum(), "either": (predicted | mask).sum()}

    def metrics(self, sums):
        return {"iou": sums["both"] / sums["either"]}
