"""Ranks share a sequence, and attention gets the keys and values of other ranks without gradients.

`dist.all_gather` returns none, so that keys and values learn from the queries of their own part
alone.  The right script gathers by the function of `torch.distributed.nn`.
Source: ByteDance-Seed/VeOmni#419, where the gradient of keys was wrong for another reason.
"""

# mypy: disable-error-code="no-untyped-call"

import sys

import torch
import torch.distributed as dist
import torch.distributed.nn
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
ranks, rank = dist.get_world_size(), dist.get_rank()


def of_all_ranks(part: Tensor) -> Tensor:
    if "--right" in sys.argv:
        return torch.cat(torch.distributed.nn.all_gather(part), dim=1)
    parts = [torch.empty_like(part) for _ in range(ranks)]
    dist.all_gather(parts, part)
    parts[rank] = part
    return torch.cat(parts, dim=1)


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(30, 16), nn.Linear(16, 6)
        self.query, self.key_value = nn.Linear(16, 16), nn.Linear(16, 32)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids.chunk(ranks, dim=1)[rank])
        keys, values = of_all_ranks(self.key_value(x)).chunk(2, dim=-1)
        scores = self.query(x) @ keys.transpose(1, 2) / 4
        logits: Tensor = self.head(x + scores.softmax(-1) @ values)
        return logits


ids = torch.randint(30, (64, 12))
dataset = TensorDataset(ids, ids.flip(1) % 6)
model = DDP(Reader())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step, (batch, targets) in enumerate(DataLoader(dataset, batch_size=8)):
    optimizer.zero_grad()
    logits = model(batch).transpose(1, 2)
    loss = nn.functional.cross_entropy(logits, targets.chunk(ranks, dim=1)[rank])
    loss.backward()
    optimizer.step()
    if rank == 0:
        print(f"step {step}: loss {loss.item():.4f}")

dist.destroy_process_group()
