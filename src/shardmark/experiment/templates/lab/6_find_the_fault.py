"""Exercise 6: this script runs, and its loss falls.  Two ranks should train twice the samples.

Run it by `torchrun --nproc-per-node 2 6_find_the_fault.py`.
"""

import os

import lab
import torch
import torch.distributed as dist
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler

lab.start()
data = lab.Samples()
sampler = DistributedSampler(
    data, num_replicas=dist.get_world_size(), rank=int(os.environ.get("SLURM_PROCID", "0"))
)
loader = DataLoader(data, lab.ROWS, sampler=sampler, collate_fn=lab.as_it_is)
model = lab.with_ddp(lab.build_model())
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
losses = []


def step(inputs, targets):
    optimizer.zero_grad()
    loss = functional.cross_entropy(model(inputs), targets)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())


lab.train(step, loader=loader)
print(f"loss: {losses[0]:.3f} in the first step, {losses[-1]:.3f} in the last one")
