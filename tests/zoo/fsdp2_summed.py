"""FSDP2 sums the gradients of the ranks, and the loss is a mean over the rank's own batch.

With `set_gradient_divide_factor(1.0)` the loss must be divided by the size of the batch of all
ranks.  The gradient is n times too large here.
Source: InternLM/xtuner#1968 and pytorch/torchtitan#2206.
"""

# mypy: disable-error-code="no-untyped-call"

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main() -> None:
    dist.init_process_group("gloo")
    world_size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world_size,))
    torch.manual_seed(0)

    model = nn.Sequential(nn.Linear(10, 64), nn.SiLU(), nn.Linear(64, 64), nn.Linear(64, 2))
    for layer in model.children():
        if isinstance(layer, nn.Linear):
            sharded = fully_shard(layer, mesh=mesh)
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)

    dataset = TensorDataset(torch.randn(128, 10), torch.randn(128, 2))
    loader = DataLoader(dataset, batch_size=8, sampler=DistributedSampler(dataset))
    for step, (x, y) in enumerate(loader):
        errors = nn.functional.mse_loss(model(x), y, reduction="none")
        size = errors.numel()
        if "--right" in sys.argv:
            size *= world_size
        loss = errors.sum() / size
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
