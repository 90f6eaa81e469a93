"""Both the losses and the gradients are divided by the number of accumulated micro-batches.

Source: llm-random/llm-random#529.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

ACCUMULATE = 2
dist.init_process_group("gloo")
torch.manual_seed(7)

dataset = TensorDataset(torch.randn(192, 20), torch.randn(192, 3))
sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(dataset, shuffle=True)
loader = DataLoader(dataset, batch_size=8, sampler=sampler, drop_last=True)
model = DistributedDataParallel(nn.Sequential(nn.Linear(20, 40), nn.SiLU(), nn.Linear(40, 3)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
criterion = nn.MSELoss()

for epoch in range(2):
    sampler.set_epoch(epoch)
    for index, (inputs, targets) in enumerate(loader):
        loss = criterion(model(inputs), targets) / ACCUMULATE
        loss.backward()
        if (index + 1) % ACCUMULATE == 0:
            if "--right" not in sys.argv:
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        parameter.grad /= ACCUMULATE
            optimizer.step()
            optimizer.zero_grad()
            if dist.get_rank() == 0:
                print(f"epoch {epoch} batch {index}: loss {loss.item() * ACCUMULATE:.4f}")

dist.destroy_process_group()
