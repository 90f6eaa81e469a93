"""A parameter server as gloo alone makes one: the other side of `parameter_server_speed.py`.

    torchrun --nproc-per-node 3 benchmarks/bare_server.py --threads 1 --out FOLDER [--no-optimizer]

ResNet-18 on scikit-learn's digits at 32 x 32.  The last rank serves: it receives every worker's
flat buckets, one thread a worker, averages them, takes a step of SGD, and sends the parameters to
all.  The others compute, send, receive.  `--no-optimizer` leaves averaging and SGD out: the server
returns the parameters as they are, which trains nothing and has the same sends and receives.

Each rank writes FOLDER/RANK.json: samples and seconds of the window, Unix time of the first step.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchvision.models import resnet18

from bare_loop import BUCKET_ELEMENTS, MEAN, SGD, STD, cross_entropy, digits

Step = Callable[[], tuple[int, float]]
"""-> samples and loss."""


def buckets_of(model: nn.Module) -> list[list[nn.Parameter]]:
    """From the last parameter to the first, at most 25 MiB in one, a larger parameter alone."""
    buckets: list[list[nn.Parameter]] = []
    filled = 0
    for parameter in reversed(list(model.parameters())):
        if not buckets or (buckets[-1] and filled + parameter.numel() > BUCKET_ELEMENTS):
            buckets.append([])
            filled = 0
        buckets[-1].append(parameter)
        filled += parameter.numel()
    return buckets


def flattened(model: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    """Parameters and gradients, a flat tensor a bucket, of which the model's become views."""
    values, gradients = [], []
    for bucket in buckets_of(model):
        value = torch.cat([parameter.detach().flatten() for parameter in bucket])
        gradient = torch.zeros_like(value)
        start = 0
        for parameter in bucket:
            place = slice(start, start + parameter.numel())
            parameter.data = value[place].view(parameter.shape)
            parameter.grad = gradient[place].view(parameter.shape)
            start = place.stop
        values.append(value)
        gradients.append(gradient)
    return values, gradients


def batches(rank: int, workers: int, global_batch: int) -> Iterator[tuple[Tensor, Tensor]]:
    pictures, labels = digits()
    scale, shift = torch.tensor(1 / (255 * STD)), torch.tensor(-MEAN / STD)
    random = np.random.default_rng(0)
    share = global_batch // workers
    while True:
        order = random.permutation(len(labels))
        for place in range(0, len(order) - global_batch + 1, global_batch):
            ids = torch.from_numpy(order[place + rank * share : place + (rank + 1) * share])
            batch = torch.empty(share, 3, 32, 32).copy_(pictures.index_select(0, ids))
            yield batch.mul_(scale).add_(shift), labels.index_select(0, ids)


def working(model: nn.Module, feed: Iterator[tuple[Tensor, Tensor]], server: int) -> Step:
    values, gradients = flattened(model)

    def step() -> tuple[int, float]:
        pictures, labels = next(feed)
        for gradient in gradients:
            gradient.zero_()
        loss = cross_entropy(model, pictures, labels)
        loss.backward()
        for gradient in gradients:
            dist.send(gradient, server)
        for value in values:
            dist.recv(value, server)
        return len(labels), float(loss.detach())

    return step


def serving(model: nn.Module, workers: int, *, optimize: bool) -> Step:
    values = [nn.Parameter(value) for value in flattened(model)[0]]
    gradients = [torch.zeros_like(value) for value in values]
    inboxes = [[torch.empty_like(gradient) for gradient in gradients] for _ in range(workers)]
    optimizer = torch.optim.SGD(values, **SGD)
    threads = ThreadPoolExecutor(workers)

    def take(rank: int) -> None:
        for inbox in inboxes[rank]:
            dist.recv(inbox, rank)

    def give(rank: int) -> None:
        for value in values:
            dist.send(value.detach(), rank)

    def step() -> tuple[int, float]:
        list(threads.map(take, range(workers)))
        if optimize:
            for value, gradient, *taken in zip(values, gradients, *inboxes, strict=True):
                gradient.copy_(taken[0])
                for other in taken[1:]:
                    gradient.add_(other)
                gradient.div_(workers)
                value.grad = gradient
            optimizer.step()
        list(threads.map(give, range(workers)))
        return 0, math.nan

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--no-optimizer", action="store_true")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--global-batch", type=int, default=64)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()

    torch.set_num_threads(options.threads)
    dist.init_process_group("gloo")
    rank, workers = dist.get_rank(), dist.get_world_size() - 1
    torch.manual_seed(0)
    model = resnet18(num_classes=10)
    if rank < workers:
        step = working(model, batches(rank, workers, options.global_batch), workers)
    else:
        step = serving(model, workers, optimize=not options.no_optimizer)
    samples, loss = 0, math.nan
    dist.barrier()
    first_step_at = time.time()
    opened = time.perf_counter()
    for index in range(options.steps):
        if index == options.warmup:
            gc.collect()
            gc.freeze()  # as in bare_loop.py
            dist.barrier()
            samples = 0
            opened = time.perf_counter()
        taken, loss = step()
        samples += taken
    report = {
        "rank": rank,
        "samples": samples,
        "window_seconds": time.perf_counter() - opened,
        "first_step_at_seconds": first_step_at,
        "threads": torch.get_num_threads(),
        "last_loss": loss,
    }
    (options.out / f"{rank}.json").write_text(json.dumps(report))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
