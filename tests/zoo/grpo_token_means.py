"""Each rank divides its policy loss by its own completion tokens, and their numbers differ.

The right script divides by the tokens of all ranks.
Source: PrimeIntellect-ai/prime-rl#2562.
"""

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

prompt, group, new_tokens, vocabulary, end = 4, 4, 8, 10, 0


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 24)
        self.cell = nn.GRU(24, 24, batch_first=True)
        self.head = nn.Linear(24, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.cell(self.embedding(tokens))[0])
        return logits


dist.init_process_group("gloo")
torch.manual_seed(0)
prompts = TensorDataset(torch.randint(1, vocabulary, (48, prompt)))
loader = DataLoader(prompts, batch_size=2, sampler=DistributedSampler(prompts))
policy = DDP(Policy())
optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
torch.manual_seed(dist.get_rank())

for (questions,) in loader:
    tokens = questions.repeat_interleave(group, dim=0)
    with torch.no_grad():
        for _ in range(new_tokens):
            probabilities = policy(tokens)[:, -1].softmax(-1)
            tokens = torch.cat([tokens, torch.multinomial(probabilities, 1)], dim=1)
    completions = tokens[:, prompt:]
    mask = ((completions == end).cumsum(1) - (completions == end).int() == 0).float()
    rewards = ((completions == tokens[:, :1]) * mask).sum(1) + 0.1 * mask.sum(1)
    groups = rewards.view(-1, group)
    centred = groups - groups.mean(1, keepdim=True)
    advantages = (centred / (groups.std(1, keepdim=True) + 1e-4)).view(-1, 1)
    logs = policy(tokens)[:, prompt - 1 : -1].log_softmax(-1)
    chosen = logs.gather(2, completions[..., None])[..., 0]
    count = mask.sum()
    if "--right" in sys.argv:
        dist.all_reduce(count)
        count /= dist.get_world_size()
    loss = -((chosen - chosen.detach()).exp() * advantages * mask).sum() / count
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
