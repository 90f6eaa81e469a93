"""Trains with FSDP2 and tensor parallelism: `torchrun --nproc-per-node 4 examples/fsdp_tp.py`.

Two neighbouring ranks divide each block between them; all pairs of ranks shard the result.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import parallel
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

BATCH_SIZE = 64  # samples in one step, over all ranks
TENSOR_RANKS = 2  # neighbouring ranks that share the layers of one model
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
    sizes = dist.get_world_size() // TENSOR_RANKS, TENSOR_RANKS
    mesh = init_device_mesh(device.type, sizes, mesh_dim_names=("data", "tensor"))
    model = make_model().to(device)
    for block in model.children():
        if isinstance(block, Block):
            # A rank computes some outputs of `up`, which are its inputs of `down`.
            plan = {"up": parallel.ColwiseParallel(), "down": parallel.RowwiseParallel()}
            parallel.parallelize_module(block, mesh["tensor"], plan)
        fully_shard(block, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    # Make the optimizer after the wrapping, which replaces the parameters.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    dataset = make_dataset()
    # Ranks that share the layers load the same samples.
    shares, share = mesh["data"].size(), mesh["data"].get_local_rank()
    sampler = DistributedSampler(dataset, num_replicas=shares, rank=share)
    loader = DataLoader(dataset, batch_size=BATCH_SIZE // shares, sampler=sampler)
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)  # without it, every epoch has the same order
        for inputs, labels in loader:
            loss = functional.cross_entropy(model(inputs.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss of the last batch on rank 0 {loss.item():.4f}")
    if options.save:  # all ranks gather the full weights
        full = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_model_state_dict(model, options=full)
        if dist.get_rank() == 0:
            torch.save(state, options.save)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--save", help="file for the weights")
    main(parser.parse_args())
