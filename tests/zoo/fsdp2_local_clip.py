"""The norm for clipping is computed over the rank's own shards of the gradients.

Each rank scales its shards by another factor.  The right script uses `clip_grad_norm_` of torch,
which computes the norm of the full gradient from sharded ones.
Source: baidu-baige/LoongForge#152.
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
    gradients = []
    for parameter in model.parameters():
        gradient = parameter.grad
        if gradient is not None:
            gradients.append(gradient.to_local() if isinstance(gradient, DTensor) else gradient)
    norm = torch.linalg.vector_norm(torch.stack([g.norm() for g in gradients]))
    for gradient in gradients:
        gradient.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))


dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 3))
fully_shard(model[0], mesh=mesh)
fully_shard(model[2], mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

dataset = TensorDataset(torch.randn(128, 8), torch.randint(0, 3, (128,)))
loader = DataLoader(dataset, batch_size=8, sampler=DistributedSampler(dataset))
for step, (x, y) in enumerate(loader):
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    if "--right" in sys.argv:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    else:
        clip_gradients(model, 0.1)
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.4f}")

dist.destroy_process_group()
