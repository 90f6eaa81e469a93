"""The embeddings of the other ranks are gathered without their gradients.

`all_gather` is no operation of autograd: a passage learns nothing from the queries of other ranks
for which it was a negative.  The right script gathers with gradients.
Source: kohjingyu/fromage#33 and modelscope/ms-swift#5477.
"""

# mypy: disable-error-code="no-untyped-call"

import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def gather(x: Tensor) -> Tensor:
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.detach().contiguous())
    parts[dist.get_rank()] = x  # the rank's own part keeps its gradient
    return torch.cat(parts)


class GatherWithGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return gather(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        grad = grads[0].contiguous().clone()
        dist.all_reduce(grad)
        return grad.chunk(dist.get_world_size())[dist.get_rank()]


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)

dataset = TensorDataset(torch.randn(128, 20), torch.randn(128, 20))
loader = DataLoader(dataset, batch_size=8, sampler=DistributedSampler(dataset))
encoder = DDP(nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 16)))
optimizer = torch.optim.SGD(encoder.parameters(), lr=0.1, momentum=0.9)

for step, (queries, passages) in enumerate(loader):
    embeddings = F.normalize(encoder(torch.cat([queries, passages])), dim=-1)
    q, p = embeddings.chunk(2)
    all_p = GatherWithGradient.apply(p) if "--right" in sys.argv else gather(p)
    scores = q @ all_p.T / 0.1
    loss = F.cross_entropy(scores, torch.arange(len(q)) + rank * len(q))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if rank == 0:
        print(f"step {step}: loss {loss.item():.4f}")

dist.destroy_process_group()
