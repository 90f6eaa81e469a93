"""The contrastive loss takes its negatives from the rank's own batch only.

With n ranks, each sample is held against 1/n of the negatives that one process would use.
The right script gathers the captions of all ranks, with their gradients.
Source: PANXiao1994/mRASP2#11 and KevinMusgrave/pytorch-metric-learning#10.
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


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        grad = grads[0].contiguous().clone()
        dist.all_reduce(grad)
        return grad.chunk(dist.get_world_size())[dist.get_rank()]


class TwoTowers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Linear(24, 48), nn.ReLU(), nn.Linear(48, 16))
        self.text = nn.Sequential(nn.Linear(12, 48), nn.ReLU(), nn.Linear(48, 16))

    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
        return F.normalize(self.image(image), dim=-1), F.normalize(self.text(text), dim=-1)


dist.init_process_group("gloo")
torch.manual_seed(0)
dataset = TensorDataset(torch.randn(128, 24), torch.randn(128, 12))
loader = DataLoader(dataset, batch_size=8, sampler=DistributedSampler(dataset))
model = DDP(TwoTowers())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

for step, (images, captions) in enumerate(loader):
    image_features, text_features = model(images, captions)
    targets = torch.arange(len(images))
    if "--right" in sys.argv:
        text_features = Gather.apply(text_features)
        targets += dist.get_rank() * len(images)
    logits = 10.0 * image_features @ text_features.T
    loss = F.cross_entropy(logits, targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.4f}")

dist.destroy_process_group()
