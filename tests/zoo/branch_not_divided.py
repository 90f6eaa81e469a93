"""The number of accumulated micro-batches does not divide one of several losses.

The trainer leaves the division to the losses.  The gradient of this one is as many times too
large as there are micro-batches.
Source: huggingface/trl#4935.
"""

# mypy: disable-error-code="no-untyped-call"

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

ACCUMULATE = 4
LOSS_TYPE = "squared"
dist.init_process_group("gloo")
torch.manual_seed(5)

features = torch.randn(256, 12)
dataset = TensorDataset(features, features[:, :2].sin())
loader = DataLoader(dataset, batch_size=4, sampler=DistributedSampler(dataset))
model = DistributedDataParallel(nn.Sequential(nn.Linear(12, 32), nn.GELU(), nn.Linear(32, 2)))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)


def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    if LOSS_TYPE == "absolute":
        return F.l1_loss(outputs, targets) / ACCUMULATE
    if LOSS_TYPE == "huber":
        return F.huber_loss(outputs, targets) / ACCUMULATE
    loss = F.mse_loss(outputs, targets)
    return loss / ACCUMULATE if "--right" in sys.argv else loss


for number, (inputs, targets) in enumerate(loader, 1):
    loss_of(model(inputs), targets).backward()
    if number % ACCUMULATE == 0:
        nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
        optimizer.zero_grad()

dist.destroy_process_group()
