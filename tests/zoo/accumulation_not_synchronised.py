"""The ranks exchange gradients at the first micro-batch of a step instead of the last.

The micro-batches after it run under `no_sync`, so each rank takes the optimizer step with a
gradient of its own, and the weights of the ranks drift apart.
Source: modelscope/FunASR#3472.
"""

# mypy: disable-error-code="no-untyped-call"

import sys
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

accum_grad = 2
dist.init_process_group("gloo")
torch.manual_seed(3)

features = torch.randn(128, 25, 10)
texts = torch.randint(0, 30, (128, 25))
dataset = TensorDataset(features, texts)
loader = DataLoader(dataset, batch_size=4, sampler=DistributedSampler(dataset))

model = DDP(nn.Sequential(nn.Linear(10, 40), nn.ReLU(), nn.Linear(40, 30)))
optim = torch.optim.Adam(model.parameters(), lr=2e-3)

for batch_idx, (speech, text) in enumerate(loader):
    if "--right" in sys.argv:
        synchronize = (batch_idx + 1) % accum_grad == 0
    else:
        synchronize = batch_idx % accum_grad == 0
    with nullcontext() if synchronize else model.no_sync():
        logits = model(speech)
        loss = nn.functional.cross_entropy(logits.transpose(1, 2), text) / accum_grad
        loss.backward()
    if (batch_idx + 1) % accum_grad == 0:
        optim.step()
        optim.zero_grad()
        if dist.get_rank() == 0:
            print(f"batch {batch_idx}: loss {loss.item() * accum_grad:.3f}")

dist.destroy_process_group()
