"""The data loader is not passed to `setup_dataloaders`, so it gets no distributed sampler.

All ranks train on the same batches.
Source: Lightning-AI/lit-llama#213.
"""

# mypy: disable-error-code="assignment"

import os
import sys

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    devices = int(os.environ.get("WORLD_SIZE", "1"))
    fabric = Fabric(accelerator="cpu", devices=devices, strategy="ddp")
    fabric.launch()
    fabric.seed_everything(1)

    dataset = TensorDataset(torch.randn(128, 10), torch.randn(128, 1))
    loader = DataLoader(dataset, batch_size=8, shuffle=True)
    network = nn.Sequential(nn.Linear(10, 50), nn.ReLU(), nn.Linear(50, 1))
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
    model, optimizer = fabric.setup(network, optimizer)
    if "--right" in sys.argv:
        loader = fabric.setup_dataloaders(loader)

    for step, (x, y) in enumerate(loader):
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        fabric.backward(loss)
        optimizer.step()
        fabric.print(f"step {step}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
