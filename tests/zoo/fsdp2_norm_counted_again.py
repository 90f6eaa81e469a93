"""The norm for clipping counts the parameters that FSDP2 leaves replicated once for every rank.

Their squared norm is part of each rank's sum, and the sums of all ranks are added.  The right
script adds the squares of shards over the ranks, and those of replicated parameters once.
Source: mindspore-ai/hyper-parallel#279.
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
torch.manual_seed(5)
model = nn.Sequential(nn.Linear(10, 40), nn.LayerNorm(40), nn.Linear(40, 40), nn.Linear(40, 3))
replicated = {*model[1].parameters(), *model[2].parameters()}
fully_shard(model, mesh=mesh, ignored_params=replicated)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)


def clip_gradients(max_norm: float) -> None:
    of_shards, of_replicated = torch.zeros(()), torch.zeros(())
    grads: list[Tensor] = [p.grad for p in model.parameters() if p.grad is not None]
    for grad in grads:
        if isinstance(grad, DTensor):
            of_shards += grad.to_local().square().sum()
        else:
            of_replicated += grad.square().sum()
    total = of_shards if "--right" in sys.argv else of_shards + of_replicated
    dist.all_reduce(total)
    norm = (total + of_replicated if "--right" in sys.argv else total).sqrt()
    for grad in grads:
        local = grad.to_local() if isinstance(grad, DTensor) else grad
        local.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))


dataset = TensorDataset(torch.randn(128, 10), torch.randint(0, 3, (128,)))
loader = DataLoader(dataset, batch_size=8, sampler=DistributedSampler(dataset))
for step, (x, y) in enumerate(loader):
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    for parameter in model.parameters():
        if parameter in replicated and parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad.div_(mesh.size())
    clip_gradients(0.1)
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.4f}")

dist.destroy_process_group()
