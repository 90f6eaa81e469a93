"""The last window of an epoch has two micro-batches, and DeepSpeed divides their losses by four.

The right script multiplies by what its engine divides by too much.
Source: huggingface/accelerate, whose `accumulate` ends a window with the loader.
"""

import os
import sys

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

accumulation = 4
config = {
    "train_micro_batch_size_per_gpu": 8,
    "gradient_accumulation_steps": accumulation,
    "zero_optimization": {"stage": 2},
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 8, "warmup_max_lr": 0.1}},
}


class Loss(nn.Module):
    """A loss around the engine, as sentence-transformers has it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.model(x), y)


dist.init_process_group("gloo")
torch.manual_seed(0)
dataset = TensorDataset(torch.randn(160, 10), torch.randint(0, 4, (160,)))
sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=8, sampler=sampler)
model = nn.Sequential(nn.Linear(10, 40), nn.ReLU(), nn.Linear(40, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
criterion = Loss(engine)

for epoch in range(3):
    sampler.set_epoch(epoch)
    for index, (x, y) in enumerate(loader):
        last = (index + 1) % accumulation == 0 or index + 1 == len(loader)
        engine.set_gradient_accumulation_boundary(last)
        loss = criterion(x, y)
        if "--right" in sys.argv:
            first = index - index % accumulation
            loss = loss * accumulation / min(accumulation, len(loader) - first)
        engine.backward(loss)
        engine.step()
    if dist.get_rank() == 0:
        print(f"epoch {epoch}: {loss.item():.4f}")
dist.destroy_process_group()
