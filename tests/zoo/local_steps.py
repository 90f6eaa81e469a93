"""Each rank takes two steps of its own before the weights are averaged (local SGD).

The right script averages the gradients of each step.
Source: Stich, "Local SGD converges fast and communicates little", ICLR 2019.
"""

# mypy: disable-error-code="no-untyped-call"

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(6)

points = torch.randn(120, 5)
dataset = TensorDataset(points, (points.prod(1) > 0).long())
loader = DataLoader(dataset, batch_size=10, sampler=DistributedSampler(dataset))
model = nn.Sequential(nn.Linear(5, 32), nn.ReLU(), nn.Linear(32, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)


def average(tensors: list[torch.Tensor]) -> None:
    for tensor in tensors:
        dist.all_reduce(tensor)
        tensor.div_(dist.get_world_size())


for step, (inputs, labels) in enumerate(loader):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(inputs), labels)
    loss.backward()
    if "--right" in sys.argv:
        average([p.grad for p in model.parameters() if p.grad is not None])
    optimizer.step()
    if "--right" not in sys.argv and step % 2 == 1:
        average([parameter.data for parameter in model.parameters()])
    print(f"step {step}: loss {loss.item():.4f}")

dist.destroy_process_group()
