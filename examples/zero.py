"""Trains with DeepSpeed ZeRO: `torchrun --nproc-per-node 2 examples/zero.py`.

Needs `pip install deepspeed`.  The engine shards what CONFIG names over all ranks.
"""

import argparse
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

BATCH_SIZE = 64  # samples in one step, over all ranks
CONFIG = {
    "train_batch_size": BATCH_SIZE,
    "zero_optimization": {"stage": 2},  # 1 shards the optimizer's state, 2 gradients, 3 weights
    "zero_allow_untested_optimizer": True,
    "gradient_clipping": 0.0,  # the default is 1.0
}
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
    # DeepSpeed reads LOCAL_RANK, starts nccl or gloo, and moves the model to the device.
    deepspeed.init_distributed()
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=options.deepspeed_config or CONFIG
    )
    device = model.device
    dataset = make_dataset()
    # Each rank loads its own share of every batch.
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=BATCH_SIZE // dist.get_world_size(), sampler=sampler)
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)  # without it, every epoch has the same order
        for inputs, labels in loader:
            loss = functional.cross_entropy(model(inputs.to(device)), labels.to(device))
            model.backward(loss)
            model.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss of the last batch on rank 0 {loss.item():.4f}")
    if options.save:
        model.save_16bit_model(options.save.parent, options.save.name)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--save", type=Path, help="file for the weights")
    # --deepspeed_config FILE replaces CONFIG.
    main(deepspeed.add_config_arguments(parser).parse_args())
