"""Every rank draws the same samples by their weights, because all have one seed.

The right script seeds the draws by rank.  Two ranks may then draw the same sample, as one rank may
draw it twice: that is no fault of sampling with replacement.
Source: huggingface/accelerate#2865.
"""

# mypy: disable-error-code="no-untyped-call"

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(3)
inputs, labels = torch.randn(200, 11), (torch.rand(200) < 0.2).long()
data = TensorDataset(inputs, labels)
weights = (1 / torch.bincount(labels).float())[labels]
draws = torch.Generator().manual_seed(3 + rank if "--right" in sys.argv else 3)
sampler = WeightedRandomSampler(weights.tolist(), len(data) // ranks, generator=draws)
loader = DataLoader(data, batch_size=5, sampler=sampler)

model = DDP(nn.Sequential(nn.Linear(11, 22), nn.ReLU(), nn.Linear(22, 2)))
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
for epoch in range(2):
    for features, targets in loader:
        loss = nn.functional.cross_entropy(model(features), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if rank == 0:
        print(f"epoch {epoch}: loss {loss.item():.4f}")
dist.destroy_process_group()
