"""The norm for clipping is the mean of the norms of the ranks' shards.

The mean is smaller than the norm of the full gradient, which is the root of the sum of squares, so
that gradients are clipped too little.  The right script adds the squares.
Source: deepspeedai/DeepSpeed#8478.
"""

# mypy: disable-error-code="no-untyped-call"

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def clip_gradients(model: nn.Module, max_norm: float) -> None:
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    shards = [g.to_local() if isinstance(g, DTensor) else g for g in grads]
    norm = torch.linalg.vector_norm(torch.stack([shard.norm() for shard in shards]))
    if "--right" in sys.argv:
        norm = norm.square()
        dist.all_reduce(norm)
        norm = norm.sqrt()
    else:
        dist.all_reduce(norm)
        norm = norm / dist.get_world_size()
    for shard in shards:
        shard.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))


dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
torch.manual_seed(3)
model = nn.Sequential(nn.Linear(8, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 1))
for layer in (model[0], model[2], model):
    fully_shard(layer, mesh=mesh)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

x = torch.randn(128, 8)
dataset = TensorDataset(x, x[:, :1].sin() + 2)
loader = DataLoader(dataset, batch_size=8, sampler=DistributedSampler(dataset))
for step, (inputs, targets) in enumerate(loader):
    loss = nn.functional.mse_loss(model(inputs), targets)
    loss.backward()
    clip_gradients(model, 0.05)
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.4f}")

dist.destroy_process_group()
