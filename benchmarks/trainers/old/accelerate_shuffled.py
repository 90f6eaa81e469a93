"""Trains a classifier by Accelerate on a shuffled loader, as its quick tour does."""

import argparse

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=4)
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--show", action="store_true", help="print the rows of each batch")
options = parser.parse_args()

accelerator = Accelerator(cpu=True)
generator = torch.Generator().manual_seed(1)
x = torch.randn(48, 8, generator=generator)
y = torch.randint(0, 3, (48,), generator=generator)
loader = DataLoader(TensorDataset(x, y), batch_size=options.batch, shuffle=True)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=options.lr)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

for epoch in range(3):
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
        if options.show:
            rows = [int((x == row).all(1).nonzero()) for row in inputs]
            print(f"rows epoch {epoch} rank {accelerator.process_index}: {rows}", flush=True)
    accelerator.print(f"epoch {epoch}: loss {loss.item():.4f}")
