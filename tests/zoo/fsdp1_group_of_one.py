"""FSDP1 shards over the second axis of a mesh of 2 x 1 ranks, and so over groups of one rank.

`HYBRID_SHARD` then becomes `NO_SHARD`, which reduces over the group that shards: over one rank.
The right script lays the ranks along the axis that shards.
Source: verl-project/verl#7493.
"""

# mypy: disable-error-code="no-untyped-call"

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)

ranks = dist.get_world_size()
shape = (1, ranks) if "--right" in sys.argv else (ranks, 1)
mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
net = nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 4))
model = FSDP(
    net,
    device_id=torch.device("cpu"),
    device_mesh=mesh,
    sharding_strategy=ShardingStrategy.HYBRID_SHARD,
    use_orig_params=True,
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
dataset = TensorDataset(torch.randn(96, 12), torch.randint(0, 4, (96,)))
loader = DataLoader(dataset, batch_size=8, sampler=DistributedSampler(dataset))

for step, (x, y) in enumerate(loader):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    if dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.4f}")

dist.destroy_process_group()
