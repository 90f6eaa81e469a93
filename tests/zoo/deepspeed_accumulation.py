"""The loss is divided by the number of accumulated micro-batches, and DeepSpeed divides it again.

`engine.backward` scales the loss by `gradient_accumulation_steps` of the configuration.
Source: deepspeedai/DeepSpeed#7439 and huggingface/accelerate#1773.
"""

import os
import sys

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

accumulation = 2
config = {
    "train_micro_batch_size_per_gpu": 8,
    "gradient_accumulation_steps": accumulation,
    "zero_optimization": {"stage": 1},
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}

dist.init_process_group("gloo")
torch.manual_seed(0)
dataset = TensorDataset(torch.randn(192, 10), torch.randint(0, 4, (192,)))
loader = DataLoader(dataset, batch_size=8, sampler=DistributedSampler(dataset))
model = nn.Sequential(nn.Linear(10, 40), nn.ReLU(), nn.Linear(40, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

for step, (x, y) in enumerate(loader):
    loss = nn.functional.cross_entropy(engine(x), y)
    if "--right" not in sys.argv:
        loss = loss / accumulation
    engine.backward(loss)
    engine.step()
    if dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.4f}")

dist.destroy_process_group()
