"""A sampler of the script shuffles by the rank's seed, so that the shares of the ranks overlap.

The seed of a rank is meant for augmentations.  The right script shuffles by one seed for all ranks.
Source: TensorAuto/OpenTau#501 and huggingface/accelerate#2268.
"""

# mypy: disable-error-code="no-untyped-call"

import random
import sys
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Sampler, TensorDataset


class EpisodeSampler(Sampler[int]):
    """Gives each rank every n-th episode of a shuffled list."""

    def __init__(self, episodes: int, shuffle_seed: int) -> None:
        self.episodes = list(range(episodes))
        self.random = random.Random(shuffle_seed)

    def __len__(self) -> int:
        return len(self.episodes) // dist.get_world_size()

    def __iter__(self) -> Iterator[int]:
        order = self.random.sample(self.episodes, len(self.episodes))
        return iter(order[dist.get_rank() :: dist.get_world_size()])


dist.init_process_group("gloo")
torch.manual_seed(7)
observations, actions = torch.randn(120, 10), torch.randn(120, 3)
seed = 7 if "--right" in sys.argv else 7 + 12345 * dist.get_rank()
episodes = TensorDataset(observations, actions)
loader = DataLoader(episodes, batch_size=4, sampler=EpisodeSampler(len(episodes), seed))

policy = DDP(nn.Sequential(nn.Linear(10, 32), nn.SiLU(), nn.Linear(32, 3)))
optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
for step, (observation, action) in enumerate(loader):
    loss = nn.functional.smooth_l1_loss(policy(observation), action)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.4f}")
dist.destroy_process_group()
