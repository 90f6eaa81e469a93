"""Trains an embedding with the distributed wrapper of pytorch-metric-learning."""

import argparse

import torch
import torch.distributed as dist
from pytorch_metric_learning import losses
from pytorch_metric_learning.utils import distributed as pml_dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--lr", type=float, default=0.05)
options = parser.parse_args()

dist.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.randn(96, 16), torch.randint(0, 4, (96,)))
sampler = DistributedSampler(data, shuffle=False)
loader = DataLoader(data, batch_size=options.batch, sampler=sampler)
model = DDP(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)))
optimizer = torch.optim.SGD(model.parameters(), lr=options.lr)
criterion = pml_dist.DistributedLossWrapper(loss=losses.ContrastiveLoss())

for x, y in loader:
    optimizer.zero_grad()
    loss = criterion(model(x), y)
    loss.backward()
    optimizer.step()

dist.destroy_process_group()
