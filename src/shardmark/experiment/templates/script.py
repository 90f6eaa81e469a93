"""Train a small network on coloured noise with DDP or FSDP, on GPUs or on the CPU."""

import argparse
import os

import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--strategy", choices=["ddp", "fsdp"], default="ddp")
strategy = parser.parse_args().strategy

distributed.init_process_group()
device = torch.device("cpu")
if torch.cuda.is_available():
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)

torch.manual_seed(0)
images = torch.randn(4096, 3, 32, 32)
labels = images.mean(dim=(2, 3)).argmax(dim=1)  # the strongest colour
data = TensorDataset(images, labels)
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=32, sampler=sampler)

convolutions = [
    nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(), nn.MaxPool2d(4))
    for inputs, outputs in ((3, 64), (64, 128))
]
model = nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(128 * 4, 3)).to(device)
if strategy == "ddp":
    model = DistributedDataParallel(model)
else:
    fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

for epoch in range(3):
    sampler.set_epoch(epoch)
    for batch, targets in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(batch.to(device)), targets.to(device))
        loss.backward()
        optimizer.step()

distributed.destroy_process_group()
