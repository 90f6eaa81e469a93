"""Parts that the exercises share: a model, data, ranks with a slow link, and the loop of steps."""

import gc
import itertools
import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import link
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, DistributedSampler

WIDTH, BLOCKS, CLASSES, SAMPLES = 256, 8, 16, 16_384
ROWS = 1024  # samples that a rank takes in a step
BUCKET_BYTES = 500_000
STEPS = int(os.environ.get("LAB_STEPS", "30"))


class Block(nn.Module):
    """A layer with a residual connection."""

    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs):
        return inputs + functional.gelu(self.linear(self.norm(inputs)))


class Samples(Dataset):
    """Random features, whose class a matrix decides; a part of them has the target -100: none."""

    def __init__(self, without_target=0.0):
        generator = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(SAMPLES, WIDTH, generator=generator)
        classes = self.inputs @ torch.randn(WIDTH, CLASSES, generator=generator)
        unknown = torch.rand(SAMPLES, generator=generator) < without_target
        self.targets = classes.argmax(1).masked_fill(unknown, -100)

    def __len__(self):
        return SAMPLES

    def __getitem__(self, row):
        return self.inputs[row], self.targets[row]

    __getitems__ = __getitem__  # a batch at once


def start():
    """Join the other ranks, over a link that is slow."""
    link.install()
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))


def build_model():
    torch.manual_seed(0)  # the same weights on all ranks
    return nn.Sequential(*(Block() for _ in range(BLOCKS)), nn.Linear(WIDTH, CLASSES))


def buckets_of(model, bucket_bytes=BUCKET_BYTES):
    """Return lists of parameters, the last one first: a backward pass reaches them in that order.

    A bucket is full as soon as its gradients have `bucket_bytes` or more.
    """
    buckets = [[]]
    for parameter in reversed([*model.parameters()]):
        if sum(p.numel() * p.element_size() for p in buckets[-1]) >= bucket_bytes:
            buckets.append([])
        buckets[-1].append(parameter)
    return buckets


def with_ddp(model, bucket_bytes=BUCKET_BYTES, reduce=None):
    """Wrap a model by PyTorch's DDP, whose buckets take the link, and do not overlap."""

    def hook(_, bucket):
        gradients = bucket.buffer().div_(dist.get_world_size())
        (reduce or dist.all_reduce)(gradients)
        future = torch.futures.Future()
        future.set_result(gradients)
        return future

    ddp = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=bucket_bytes / 2**20)
    ddp.register_comm_hook(None, hook)
    return ddp


def as_it_is(batch):
    """Return a batch, which `Samples` has put together."""
    return batch


def train(step, micro_batches=1, loader=None):
    """Call `step` with each batch, or with a list of micro-batches, and print what a step takes."""
    if loader is None:
        data = Samples(without_target=0.0 if micro_batches == 1 else 1 / 3)
        sampler = DistributedSampler(data)  # another share of the samples for each rank
        loader = DataLoader(data, ROWS // micro_batches, sampler=sampler, collate_fn=as_it_is)
    channel, messages, sent_bytes, times = link.channel, 0, 0.0, []
    channel.messages, channel.sent_bytes = 0, 0.0
    try:
        for batch in itertools.islice(_batches(loader, micro_batches), STEPS):
            step(*batch[0]) if micro_batches == 1 else step(batch)
            times.append(time.perf_counter())
            messages, sent_bytes = channel.messages, channel.sent_bytes
    finally:
        channel.drain()
        if len(times) > 1:
            _report(times, messages / len(times), sent_bytes / len(times))
    dist.destroy_process_group()


def _batches(loader, count):
    for epoch in itertools.count():
        loader.sampler.set_epoch(epoch)  # another order in every epoch
        batches = iter(loader)
        while len(batch := [*itertools.islice(batches, count)]) == count:
            yield batch


def _report(times, messages, sent_bytes):
    optimizers = [o for o in gc.get_objects() if issubclass(type(o), torch.optim.Optimizer)]
    states = [state for optimizer in optimizers for state in optimizer.state.values()]
    tensors = {id(v): v for s in states for v in s.values() if torch.is_tensor(v)}.values()
    state_bytes = sum(t.numel() * t.element_size() for t in tensors if t.numel() > 1)
    step_seconds = (times[-1] - times[0]) / (len(times) - 1)
    facts = {"messages": messages, "sent_bytes": sent_bytes, "state_bytes": state_bytes}
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        print(
            f"{len(times)} steps of {1e3 * step_seconds:.0f} ms; {messages:.1f} messages and "
            f"{sent_bytes / 1e6:.2f} MB a step; {state_bytes / 1e6:.2f} MB of optimizer state"
        )
    if folder := os.environ.get("LAB_REPORT"):
        file = f"{Path(sys.argv[0]).stem}-{ranks}-{rank}.json"
        Path(folder, file).write_text(json.dumps({"step_seconds": step_seconds, **facts}))
