"""Two ranks compute the halves of each sequence, and DDP gets the group of data parallelism.

That group has one rank, so that DDP reduces nothing: each rank keeps the gradient of its half.
The right script gives DDP all ranks, which share the tokens.
Source: ByteDance-Seed/VeOmni#1115.
"""

# mypy: disable-error-code="no-untyped-call"

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Tagger(nn.Module):
    """Classifies tokens by their id and position; computes this rank's part of the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(50, 16), nn.Embedding(12, 16)
        self.head = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 7))

    def forward(self, ids: Tensor, tags: Tensor) -> Tensor:
        part, places = sequence.get_local_rank(), torch.arange(ids.shape[1])
        mine = places.chunk(sequence.size())[part]
        logits = self.head(self.tokens(ids[:, mine]) + self.positions(mine))
        return nn.functional.cross_entropy(logits.transpose(1, 2), tags[:, mine])


dist.init_process_group("gloo")
torch.manual_seed(0)
mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("data", "sequence"))
data, sequence = mesh["data"], mesh["sequence"]
model = DDP(Tagger(), process_group=None if "--right" in sys.argv else data.get_group())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
ids = torch.randint(50, (64, 12))
dataset = TensorDataset(ids, (ids + torch.arange(12)) % 7)
sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(
    dataset, num_replicas=data.size(), rank=data.get_local_rank()
)
for step, (batch, tags) in enumerate(DataLoader(dataset, batch_size=8, sampler=sampler)):
    optimizer.zero_grad()
    loss = model(batch, tags)
    loss.backward()
    optimizer.step()
    if dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.4f}")

dist.destroy_process_group()
