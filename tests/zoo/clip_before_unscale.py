"""The gradients are clipped while the loss scale is still in them.

Their norm is tens of thousands of times the real one, so the clipping leaves almost nothing.
The right script calls `unscale_` before it clips.
Source: milesial/Pytorch-UNet#468 and pytorch/examples#1196.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)

images, masks = torch.randn(64, 3, 8, 8), torch.randint(0, 2, (64, 8, 8))
dataset = TensorDataset(images, masks)
loader = DataLoader(dataset, batch_size=4, sampler=DistributedSampler(dataset))

net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 2, 1))
model = DDP(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
grad_scaler = torch.amp.GradScaler("cpu")
criterion = nn.CrossEntropyLoss()

for step, (image, mask) in enumerate(loader):
    optimizer.zero_grad(set_to_none=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = criterion(model(image), mask)
    grad_scaler.scale(loss).backward()
    if "--right" in sys.argv:
        grad_scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    grad_scaler.step(optimizer)
    grad_scaler.update()
    if dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.4f}")

dist.destroy_process_group()
