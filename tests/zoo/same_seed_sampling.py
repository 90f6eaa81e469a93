"""The ranks draw their random batches with the same seed, so they train on the same data.

The right script adds the rank to the seed.
Source: Shark-NLP/DiffuSeq#37 and karpathy/nanoGPT#204.
"""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

block_size, batch_size, vocab_size = 16, 4, 64

dist.init_process_group("gloo")
ddp_rank = int(os.environ["RANK"])
seed_offset = ddp_rank if "--right" in sys.argv else 0
data = torch.randint(0, vocab_size, (5000,), generator=torch.Generator().manual_seed(99))
torch.manual_seed(1337 + seed_offset)


def get_batch() -> tuple[Tensor, Tensor]:
    ix = torch.randint(len(data) - block_size, (batch_size,)).tolist()
    x = torch.stack([data[i : i + block_size] for i in ix])
    y = torch.stack([data[i + 1 : i + 1 + block_size] for i in ix])
    return x, y


class Bigram(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(vocab_size, 32)
        self.mlp = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
        self.lm_head = nn.Linear(32, vocab_size, bias=False)

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        h = self.wte(idx)
        logits = self.lm_head(h + self.mlp(h))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


model = DDP(Bigram())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
for iter_num in range(6):
    X, Y = get_batch()
    loss = model(X, Y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if ddp_rank == 0:
        print(f"iter {iter_num}: loss {loss.item():.4f}")
dist.destroy_process_group()
