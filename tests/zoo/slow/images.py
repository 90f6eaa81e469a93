"""An image classifier whose loader decodes JPEG files, as people write it."""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import io

import faults  # type: ignore[import-not-found]
import torch
import torch.distributed as dist
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from torchvision.transforms.functional import pil_to_tensor, resize

args = faults.arguments(batch=16, side=160, workers=0)
dist.init_process_group("gloo")


def encoded(seed: int) -> bytes:
    noise = torch.rand(3, 20, 20, generator=torch.Generator().manual_seed(seed))
    pixels = (resize(noise, [args.side] * 2) * 255).byte().permute(1, 2, 0).numpy()
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG")
    return file.getvalue()


class Photos(Dataset[tuple[Tensor, int]]):
    def __init__(self, count: int) -> None:
        self.files = [encoded(seed) for seed in range(count)]

    def __len__(self) -> int:
        return 8 * len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        number = index % len(self.files)
        image = Image.open(io.BytesIO(self.files[number])).convert("RGB").resize((32, 32))
        return pil_to_tensor(image).float() / 255, number % 10


layers: list[nn.Module] = []
for ins, outs in ((3, 32), (32, 64), (64, 64)):
    layers += [nn.Conv2d(ins, outs, 3, 2, 1), nn.BatchNorm2d(outs), nn.ReLU()]
plain = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
model = nn.parallel.DistributedDataParallel(plain)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
photos = Photos(256)
sampler: DistributedSampler[tuple[Tensor, int]] = DistributedSampler(photos)
loader = DataLoader(photos, batch_size=args.batch, sampler=sampler, num_workers=args.workers)
step = 0
for epoch in range(1000):
    sampler.set_epoch(epoch)
    for images, labels in loader:
        loss: Tensor = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if step % 100 == 0 and faults.RANK == 0:
            print(f"epoch {epoch} step {step} loss {loss.item():.3f}", flush=True)
dist.destroy_process_group()
