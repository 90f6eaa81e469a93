"""The loss has weights of its own, and it is not wrapped in DDP.

The gradients of the class centres are never averaged, so the centres drift apart.
Source: KevinMusgrave/pytorch-metric-learning#710.
"""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class CosFace(nn.Module):
    """Cross-entropy of scaled cosines, with a margin for the right class."""

    def __init__(
        self, features: int, classes: int, scale: float = 8.0, margin: float = 0.2
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(classes, features))
        self.scale, self.margin = scale, margin

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        cosines = F.normalize(embeddings) @ F.normalize(self.weight).T
        margins = self.margin * F.one_hot(labels, len(self.weight))
        return F.cross_entropy(self.scale * (cosines - margins), labels)


dist.init_process_group("gloo")
torch.manual_seed(0)
dataset = TensorDataset(torch.randn(128, 20), torch.randint(0, 10, (128,)))
loader = DataLoader(dataset, batch_size=8, sampler=DistributedSampler(dataset))

model = DDP(nn.Sequential(nn.Linear(20, 40), nn.ReLU(), nn.Linear(40, 16)))
criterion: nn.Module = CosFace(16, 10)
if "--right" in sys.argv:
    criterion = DDP(criterion)
optimizer = torch.optim.SGD([*model.parameters(), *criterion.parameters()], lr=0.1, momentum=0.9)

for step, (images, labels) in enumerate(loader):
    loss = criterion(model(images), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if dist.get_rank() == 0:
        print(f"[{step}] {loss.item():.4f}")

dist.destroy_process_group()
