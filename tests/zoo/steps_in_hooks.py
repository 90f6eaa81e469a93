"""Each parameter has an optimizer, which steps in a hook as soon as its gradient is there.

DDP reduces a gradient after these hooks, so that each rank uses that of its own samples.  The right
script has no DDP, and reduces in the hook.
"""

# mypy: disable-error-code="no-untyped-call"

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

RIGHT = "--right" in sys.argv


def update(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    if RIGHT:
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
    optimizers[parameter].step()
    optimizers[parameter].zero_grad()


dist.init_process_group("gloo")
torch.manual_seed(0)
network = nn.Sequential(nn.Linear(9, 18), nn.ReLU(), nn.Linear(18, 4))
model = network if RIGHT else DDP(network)
optimizers: dict[torch.Tensor, torch.optim.Adam] = {
    p: torch.optim.Adam([p], lr=1e-3) for p in network.parameters()
}
for weight in network.parameters():
    weight.register_post_accumulate_grad_hook(update)

data = TensorDataset(torch.randn(128, 9), torch.randint(4, (128,)))
for inputs, labels in DataLoader(data, 8, sampler=DistributedSampler(data)):
    loss = nn.functional.cross_entropy(model(inputs), labels)
    loss.backward()
    if dist.get_rank() == 0:
        print(loss.item())

dist.destroy_process_group()
