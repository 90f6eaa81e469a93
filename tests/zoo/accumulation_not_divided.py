"""The losses of the accumulated micro-batches are added up and never divided by their number.

The gradient is as many times too large as there are micro-batches.
Source: karpathy/nanoGPT#206.
"""

# mypy: disable-error-code="no-untyped-call"

import sys
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

gradient_accumulation_steps = 4

dist.init_process_group("gloo")
torch.manual_seed(0)
dataset = TensorDataset(torch.randn(256, 12), torch.randint(0, 6, (256,)))
loader = DataLoader(dataset, batch_size=4, sampler=DistributedSampler(dataset))
batches = iter(loader)

model = DDP(nn.Sequential(nn.Linear(12, 48), nn.ReLU(), nn.Linear(48, 6)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

for step in range(6):
    for micro_step in range(gradient_accumulation_steps):
        x, y = next(batches)
        last = micro_step == gradient_accumulation_steps - 1
        with nullcontext() if last else model.no_sync():
            loss = F.cross_entropy(model(x), y)
            if "--right" in sys.argv:
                loss = loss / gradient_accumulation_steps
            loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if dist.get_rank() == 0:
        print(f"iter {step}: loss {loss.item():.4f}")

dist.destroy_process_group()
