"""The last window of an epoch has two micro-batches, and their losses are divided by four.

The right script divides by the number of micro-batches that the window has.
Source: modelscope/ms-swift#10084 and hiyouga/LlamaFactory#10705.
"""

import sys
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

accumulation = 4

dist.init_process_group("gloo")
torch.manual_seed(0)
dataset = TensorDataset(torch.randn(160, 12), torch.randint(5, (160,)))
sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=8, sampler=sampler)
model = DDP(nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Dropout(0.1), nn.Linear(24, 5)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
criterion = nn.CrossEntropyLoss()

for epoch in range(3):
    sampler.set_epoch(epoch)
    for index, (x, y) in enumerate(loader):
        first = index - index % accumulation
        last = (index + 1) % accumulation == 0 or index + 1 == len(loader)
        count = accumulation
        if "--right" in sys.argv:
            count = min(accumulation, len(loader) - first)
        with nullcontext() if last else model.no_sync():
            loss = criterion(model(x), y) / count
            loss.backward()
        if last:
            nn.utils.clip_grad_norm_(model.parameters(), 10.0)
            optimizer.step()
            optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"epoch {epoch}: {loss.item():.4f}")
dist.destroy_process_group()
