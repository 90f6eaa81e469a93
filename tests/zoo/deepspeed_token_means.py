"""Each rank divides its loss by the number of its own tokens, and ZeRO averages over the ranks.

The right script divides by the tokens of all ranks and undoes the division by the number of ranks.
Source: deepspeedai/DeepSpeed#4662 and pytorch/torchtitan#2206.
"""

import os
import sys

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

config = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_clipping": 0.0,
    "zero_optimization": {"stage": 2},
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}

deepspeed.init_distributed(dist_backend="gloo")
torch.manual_seed(0)
tokens = torch.randint(0, 40, (128, 13))
targets = tokens[:, 1:].clone()
targets[torch.arange(12) >= torch.randint(1, 13, (128, 1))] = -100  # padding
dataset = TensorDataset(tokens[:, :-1], targets)
loader = DataLoader(dataset, batch_size=4, sampler=DistributedSampler(dataset))
model = nn.Sequential(nn.Embedding(40, 32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 40))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

for step, (x, y) in enumerate(loader):
    total = F.cross_entropy(engine(x).flatten(0, 1), y.flatten(), reduction="sum")
    count = (y != -100).sum()
    if "--right" in sys.argv:
        dist.all_reduce(count)
        loss = total / count * dist.get_world_size()
    else:
        loss = total / count
    engine.backward(loss)
    engine.step()
    if dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.4f}")

dist.destroy_process_group()
