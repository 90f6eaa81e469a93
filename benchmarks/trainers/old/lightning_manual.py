"""Trains a classifier by Lightning with manual optimization and a static graph."""

import argparse
import os

import lightning as L
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--lr", type=float, default=0.1)
options = parser.parse_args()


class Classifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))

    def training_step(self, batch, index):
        x, y = batch
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.manual_backward(loss)
        optimizer.step()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=options.lr)


L.seed_everything(0)
data = TensorDataset(torch.randn(96, 8), torch.randint(0, 3, (96,)))
L.Trainer(
    accelerator="cpu", devices=int(os.environ.get("WORLD_SIZE", "1")), max_epochs=2,
    strategy=DDPStrategy(static_graph=True), logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False,
).fit(Classifier(), DataLoader(data, batch_size=options.batch))  # fmt: skip
