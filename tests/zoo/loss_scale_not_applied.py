"""Gradients are divided by a loss scale that the loss was never multiplied by.

The scale is made for fp16; with bf16 the loss keeps its size, and the optimizer gets 1/1024 of the
gradient, in one process too.
Source: deepspeedai/DeepSpeed#7837 and #8393.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

SCALE = 1024.0
dist.init_process_group("gloo")
torch.manual_seed(5)

dataset = TensorDataset(torch.randn(128, 12), torch.randint(0, 4, (128,)))
loader = DataLoader(dataset, batch_size=8, sampler=DistributedSampler(dataset))
model = DistributedDataParallel(nn.Sequential(nn.Linear(12, 32), nn.GELU(), nn.Linear(32, 4)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

for step, (inputs, targets) in enumerate(loader):
    loss = nn.functional.cross_entropy(model(inputs), targets)
    scaled = loss * SCALE if "--right" in sys.argv else loss
    scaled.backward()  # type: ignore[no-untyped-call]  # torch's
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad /= SCALE
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.4f}")

dist.destroy_process_group()
