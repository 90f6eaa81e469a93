"""The data loader has no distributed sampler, so all ranks train on the same batches.

Source: PatrickHua/SimSiam#16 and karpathy/llama2.c#522.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def make_loader(right: bool) -> DataLoader[tuple[torch.Tensor, ...]]:
    dataset = TensorDataset(torch.randn(128, 16), torch.randint(0, 5, (128,)))
    if right:
        return DataLoader(dataset, batch_size=8, sampler=DistributedSampler(dataset))
    return DataLoader(dataset, batch_size=8, shuffle=True)


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    loader = make_loader("--right" in sys.argv)
    model = DDP(nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 5)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    criterion = nn.CrossEntropyLoss()
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0:
            print(f"step {step} loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
