"""The tokens of the accumulated micro-batches are counted on the rank, not over all ranks.

The right script gathers the counts and multiplies the loss by the number of ranks, because the
gradients are averaged over the ranks.
Source: huggingface/accelerate#3193.
"""

# mypy: disable-error-code="import-untyped"

import sys

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

accumulation = 2
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
set_seed(0)

tokens = torch.randint(0, 60, (192, 13))
labels = tokens[:, 1:].clone()
labels[torch.arange(12) >= torch.randint(2, 13, (192, 1))] = -100
loader = DataLoader(TensorDataset(tokens[:, :-1], labels), batch_size=4, shuffle=True)
model = nn.Sequential(nn.Embedding(60, 32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 60))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
criterion = nn.CrossEntropyLoss(ignore_index=-100, reduction="sum")

batches = iter(loader)
for step in range(len(loader) // accumulation):
    micro_batches = [next(batches) for _ in range(accumulation)]
    num_items = sum((y != -100).sum() for _, y in micro_batches)
    scale = accumulation  # `backward` divides by it
    if "--right" in sys.argv:
        num_items = accelerator.gather(num_items).sum()
        scale *= accelerator.num_processes
    for x, y in micro_batches:
        with accelerator.accumulate(model):
            loss = criterion(model(x).flatten(0, 1), y.flatten()) * scale / num_items
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    accelerator.print(f"step {step}: loss {loss.item() / scale:.4f}")

accelerator.end_training()
