"""Adapters are added to the layers after FSDP2 wrapped the model, and nobody reduces them.

Each rank trains adapters of its own.  The right script adds them before it wraps the model.
Source: hao-ai-lab/FastVideo#1666.
"""

# mypy: disable-error-code="no-untyped-call"

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(24, 24).requires_grad_(False)
        self.down: nn.Module | None = None

    def add_adapter(self) -> None:
        self.down, self.up = nn.Linear(24, 4, bias=False), nn.Linear(4, 24, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x) + (0 if self.down is None else self.up(self.down(x))))


def add_adapters(model: nn.Module) -> None:
    for layer in model.modules():
        if isinstance(layer, Layer):
            layer.add_adapter()


dist.init_process_group("gloo")
torch.manual_seed(1)
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
model = nn.Sequential(Layer(), Layer(), nn.Linear(24, 3))
if "--right" in sys.argv:
    add_adapters(model)
fully_shard(model, mesh=mesh)
if "--right" not in sys.argv:
    add_adapters(model)
trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
optimizer = torch.optim.AdamW(trained, lr=3e-3)

dataset = TensorDataset(torch.randn(96, 24), torch.randint(0, 3, (96,)))
loader = DataLoader(dataset, batch_size=8, sampler=DistributedSampler(dataset))
for step, (x, y) in enumerate(loader):
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.4f}")

dist.destroy_process_group()
