"""Trains with DDP and a sharded optimizer: `torchrun --nproc-per-node 2 examples/zro.py`.

Every rank holds the full model, and the optimizer's state of some of its parameters.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

BATCH_SIZE = 64  # samples in one step, over all ranks
FEATURES, WIDTH, CLASSES = 64, 128, 10


class Block(nn.Module):
    """Two linear layers with a residual connection."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, inputs):
        return inputs + self.down(functional.gelu(self.up(self.norm(inputs))))


def make_model():
    torch.manual_seed(0)  # the ranks start from the same weights
    blocks = [Block() for _ in range(4)]
    return nn.Sequential(nn.Linear(FEATURES, WIDTH), *blocks, nn.Linear(WIDTH, CLASSES))


def make_dataset():
    """Return points around one centre for each class."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(CLASSES, FEATURES, generator=generator)
    labels = torch.randint(CLASSES, (2048,), generator=generator)
    noise = 2 * torch.randn(len(labels), FEATURES, generator=generator)
    return TensorDataset(centres[labels] + noise, labels)


def main(options):
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))  # torchrun sets LOCAL_RANK
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    model = DistributedDataParallel(make_model().to(device))
    # Each rank holds the state of some parameters, updates them, and broadcasts them.
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), optimizer_class=torch.optim.SGD, lr=0.05
    )
    dataset = make_dataset()
    # Each rank loads its own share of every batch.
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=BATCH_SIZE // dist.get_world_size(), sampler=sampler)
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)  # without it, every epoch has the same order
        for inputs, labels in loader:
            loss = functional.cross_entropy(model(inputs.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss of the last batch on rank 0 {loss.item():.4f}")
    if options.save and dist.get_rank() == 0:
        torch.save(model.module.state_dict(), options.save)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--save", help="file for the weights")
    main(parser.parse_args())
