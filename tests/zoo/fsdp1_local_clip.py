"""`torch.nn.utils.clip_grad_norm_` clips an FSDP1 model by the norm of the rank's shards.

The right script calls `clip_grad_norm_` of the FSDP1 module, which adds up the norms of the ranks.
Source: pytorch/pytorch#72548 and PrimeIntellect-ai/OpenDiloco#6.
"""

# mypy: disable-error-code="no-untyped-call"

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)

net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 5))
model = FSDP(net, device_id=torch.device("cpu"), use_orig_params=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
dataset = TensorDataset(torch.randn(128, 16), torch.randint(0, 5, (128,)))
loader = DataLoader(dataset, batch_size=8, sampler=DistributedSampler(dataset))

for step, (x, y) in enumerate(loader):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    if "--right" in sys.argv:
        model.clip_grad_norm_(0.1)
    else:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    if dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.4f}")

dist.destroy_process_group()
