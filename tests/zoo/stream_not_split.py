"""Every rank reads the whole stream of samples, so all ranks train on the same ones.

The right script gives each rank every n-th sample of the stream.
Source: Smith42/astroPT#64.
"""

import itertools
import sys
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset


class Galaxies(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(5)
        stream = (torch.randn(12, generator=generator) for _ in range(400))
        if "--right" in sys.argv:
            return itertools.islice(stream, dist.get_rank(), None, dist.get_world_size())
        return stream


dist.init_process_group("gloo")
torch.manual_seed(0)
model = DDP(nn.Sequential(nn.Linear(11, 32), nn.GELU(), nn.Linear(32, 1)))
criterion = nn.HuberLoss()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
for step, patches in enumerate(DataLoader(Galaxies(), batch_size=8)):
    loss = criterion(model(patches[:, :11]), patches[:, 11:])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.4f}")
dist.destroy_process_group()
