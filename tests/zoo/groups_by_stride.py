"""A failed sample is dropped, and groups are still found by a fixed stride of four rows.

The right script finds the groups by the prompt of each row.
Source: areal-project/AReaL#1419.
"""

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

group, groups_per_batch, actions = 4, 2, 6

dist.init_process_group("gloo")
torch.manual_seed(0)
prompts = torch.arange(24).repeat_interleave(group)
observations = torch.randn(24, 10).repeat_interleave(group, dim=0)
chosen = torch.randint(actions, (96,))
rewards = torch.randn(96) + prompts % 5
valid = torch.rand(96) > 0.15
rollouts = TensorDataset(
    *(t.view(24, group, *t.shape[1:]) for t in (prompts, observations, chosen, rewards, valid))
)
sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(rollouts)
loader = DataLoader(rollouts, batch_size=groups_per_batch, sampler=sampler)
policy = DDP(nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, actions)))
optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)


def centred(reward: Tensor, prompt: Tensor) -> Tensor:
    """Subtract the mean of each row's group."""
    if "--right" in sys.argv:
        of_group = (prompt[:, None] == prompt[None, :]).float()
        return reward - of_group @ reward / of_group.sum(1)
    parts = [reward[first : first + group] for first in range(0, len(reward), group)]
    return torch.cat([part - part.mean() for part in parts])


for batch in loader:
    kept = batch[4].flatten()
    prompt, observation, action, reward = (part.flatten(0, 1)[kept] for part in batch[:4])
    logs = policy(observation).log_softmax(-1).gather(1, action[:, None])[:, 0]
    loss = -(logs * centred(reward, prompt)).sum() / len(kept)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
