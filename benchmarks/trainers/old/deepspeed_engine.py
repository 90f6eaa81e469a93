"""Trains by DeepSpeed in 16 bits: an encoder sees a row and its noisy copy in each step."""

import argparse
import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--stage", type=int, default=2)
parser.add_argument("--offload", action="store_true")
parser.add_argument("--fp32", action="store_true")
parser.add_argument("--fp16", action="store_true")
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--lr", type=float, default=0.05)
options = parser.parse_args()


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 32))
        self.head = nn.Linear(32, 4)

    def forward(self, x, other, y):
        features, others = self.encoder(x), self.encoder(other)
        logits = self.head(features).float()
        return nn.functional.cross_entropy(logits, y) + (features - others).float().pow(2).mean()


config = {
    "train_micro_batch_size_per_gpu": options.batch,
    "gradient_accumulation_steps": options.accumulate,
    "bf16": {"enabled": not (options.fp32 or options.fp16)},
    "fp16": {"enabled": options.fp16},
    "zero_optimization": {"stage": options.stage},
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}
if options.offload:
    config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}

if options.fp16:  # slow on CPUs, but DeepSpeed asks whether they have instructions for it
    deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True
deepspeed.init_distributed(dist_backend="gloo")
torch.manual_seed(0)
x, y = torch.randn(96, 16), torch.randint(0, 4, (96,))
data = TensorDataset(x, x + 0.3 * torch.randn(96, 16), y)
sampler = DistributedSampler(data, shuffle=False)
loader = DataLoader(data, batch_size=options.batch, sampler=sampler)
model = Network()
optimizer = torch.optim.SGD(model.parameters(), lr=options.lr)
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
type_ = torch.float32 if options.fp32 else torch.float16 if options.fp16 else torch.bfloat16

for x, other, y in loader:
    loss = engine(x.to(type_), other.to(type_), y)
    engine.backward(loss)
    engine.step()
