"""Only the generator is wrapped: each rank trains a discriminator of its own.

The right script wraps both.
Source: CyberAgentAILab/RALF#21.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(3)
images = TensorDataset(torch.randn(96, 20).tanh())
loader = DataLoader(images, batch_size=8, sampler=DistributedSampler(images))
generator: nn.Module = DDP(nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 20), nn.Tanh()))
critic: nn.Module = nn.Sequential(nn.Linear(20, 24), nn.LeakyReLU(0.2), nn.Linear(24, 1))
if "--right" in sys.argv:
    critic = DDP(critic)
torch.manual_seed(3 + dist.get_rank())
optimizer_g = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
optimizer_d = torch.optim.Adam(critic.parameters(), lr=2e-4, betas=(0.5, 0.999))
criterion = nn.BCEWithLogitsLoss()

for step, (real,) in enumerate(loader):
    valid, fake = torch.ones(len(real), 1), torch.zeros(len(real), 1)
    generated = generator(torch.randn(len(real), 6))

    optimizer_d.zero_grad()
    loss_d = (criterion(critic(real), valid) + criterion(critic(generated.detach()), fake)) / 2
    loss_d.backward()
    optimizer_d.step()

    optimizer_g.zero_grad()
    loss_g = criterion(critic(generated), valid)
    loss_g.backward()
    optimizer_g.step()
    if dist.get_rank() == 0:
        print(f"step {step}: D {loss_d.item():.4f}, G {loss_g.item():.4f}")
dist.destroy_process_group()
