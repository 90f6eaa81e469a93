"""Each rank clips the replicated weights by the norm of them and of its own shards of the experts.

The squared norms of the experts' shards are not added over the ranks, so that each rank multiplies
the same replicated gradients by another factor, and the weights drift apart.
Source: NVIDIA-NeMo/Automodel#3817.
"""

# mypy: disable-error-code="no-untyped-call"

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
torch.manual_seed(1)


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense, self.router = nn.Linear(12, 24), nn.Linear(24, 4)
        self.experts = nn.ModuleList(nn.Linear(24, 3) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.dense(x))
        weights = self.router(hidden).softmax(-1)
        outputs = torch.stack([expert(hidden) for expert in self.experts], dim=2)
        return torch.einsum("bcn,bn->bc", outputs, weights)


model = Mixture()
for expert in model.experts:
    fully_shard(expert, mesh=mesh)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
dataset = TensorDataset(torch.randn(96, 12), torch.randint(0, 3, (96,)))
for x, y in DataLoader(dataset, batch_size=8, sampler=DistributedSampler(dataset)):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    dense, shards = [], []
    for grad in (p.grad for p in model.parameters() if p.grad is not None):
        if isinstance(grad, DTensor):
            shards.append(grad.to_local())
        else:
            dist.all_reduce(grad)
            dense.append(grad.div_(mesh.size()))
    squares = torch.stack([shard.square().sum() for shard in shards]).sum()
    if "--right" in sys.argv:
        dist.all_reduce(squares)
    norm = (squares + torch.stack([grad.square().sum() for grad in dense]).sum()).sqrt()
    for part in (*dense, *shards):
        part.mul_((0.1 / (norm + 1e-6)).clamp(max=1.0))
    optimizer.step()
    print(f"rank {dist.get_rank()}: loss {loss.item():.4f}")

dist.destroy_process_group()
