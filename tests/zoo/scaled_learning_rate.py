"""The learning rate is multiplied by the number of ranks, although the global batch stays the same.

The batch size is divided among the ranks, so nothing calls for another learning rate.
Source: mala-project/mala#422.
"""

# mypy: disable-error-code="no-untyped-call"

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=32, help="of all ranks together")
parser.add_argument("--lr", type=float, default=0.05)
parser.add_argument("--right", action="store_true")
args = parser.parse_args()

dist.init_process_group("gloo")
world_size = dist.get_world_size()
torch.manual_seed(0)

dataset = TensorDataset(torch.randn(256, 12), torch.randn(256, 4))
loader = DataLoader(
    dataset, batch_size=args.batch_size // world_size, sampler=DistributedSampler(dataset)
)
model = DDP(nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 4)))
if not args.right:
    args.lr *= world_size
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4)

for step, (x, y) in enumerate(loader):
    loss = nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if dist.get_rank() == 0:
        print(f"step {step}: lr {args.lr} loss {loss.item():.4f}")

dist.destroy_process_group()
