"""Pre-trains a network by a loss of lightly on two views of each row."""

import argparse
import os

os.environ["LIGHTLY_DID_VERSION_CHECK"] = "True"

import torch
import torch.distributed as dist
from lightly.loss import BarlowTwinsLoss, NTXentLoss
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--loss", choices=["barlow", "ntxent"], default="barlow")
parser.add_argument("--gather", action="store_true")
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--lr", type=float, default=0.05)
options = parser.parse_args()

dist.init_process_group("gloo")
torch.manual_seed(0)
x = torch.randn(96, 16)
data = TensorDataset(x + 0.2 * torch.randn(96, 16), x + 0.2 * torch.randn(96, 16))
sampler = DistributedSampler(data, shuffle=False)
loader = DataLoader(data, batch_size=options.batch, sampler=sampler)
model = DDP(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)))
optimizer = torch.optim.SGD(model.parameters(), lr=options.lr)
loss_class = {"barlow": BarlowTwinsLoss, "ntxent": NTXentLoss}[options.loss]
criterion = loss_class(gather_distributed=options.gather)

for first, second in loader:
    optimizer.zero_grad()
    outputs = model(torch.cat([first, second]))
    loss = criterion(*outputs.chunk(2))
    loss.backward()
    optimizer.step()

dist.destroy_process_group()
