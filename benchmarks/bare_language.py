"""Language modelling as nanoGPT's training script does it: the other side of `language_speed.py`.

    torchrun --nproc-per-node 2 benchmarks/bare_language.py --strategy ddp --out FOLDER

The model and the tokens are those of `language-quickstart`; samples begin at random places.  Writes
what `bare_loop.py` writes, but for samples and losses.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from shardmark.workloads.language.gpt import GPT
from shardmark.workloads.language.options import LanguageOptions
from shardmark.workloads.language.tokens import token_data

LEARNING_RATE = 4e-3
SCHEDULE_STEPS = 30
"""Of the rising learning rate."""
CLIPPING = 1.0
SEQUENCE_LENGTH = 128


def learning_rate(step: int, steps: int) -> float:
    if step < SCHEDULE_STEPS:
        return LEARNING_RATE * (step + 1) / SCHEDULE_STEPS
    done = (step - SCHEDULE_STEPS) / max(1, steps - SCHEDULE_STEPS)
    return LEARNING_RATE * 0.5 * (1 + math.cos(math.pi * done))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strategy", choices=("single", "ddp"), required=True)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--global-batch", type=int, default=8)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()

    torch.set_num_threads(options.threads)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    data = token_data(LanguageOptions())
    tokens = data.training.tokens
    torch.manual_seed(0)
    model: nn.Module = GPT(
        vocabulary=data.vocabulary,
        sequence_length=SEQUENCE_LENGTH,
        layers=2,
        width=128,
        heads=4,
    )
    if options.strategy == "ddp":
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, weight_decay=0.1, betas=(0.9, 0.95)
    )
    share = options.global_batch // world_size
    random = np.random.default_rng(rank)
    started_at: list[float] = []
    for step in range(options.steps):
        if step == options.warmup:
            # As in `bare_loop.py`: what the imports left is not searched inside the window.
            gc.collect()
            gc.freeze()
            (options.out / f"{rank}.warm").touch()
            dist.barrier()
        started_at.append(time.time())
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, options.steps)
        places = random.integers(len(tokens) - SEQUENCE_LENGTH, size=share)
        windows = [tokens[at : at + SEQUENCE_LENGTH + 1].astype(np.int64) for at in places]
        batch = torch.from_numpy(np.stack(windows))
        logits = model(batch[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIPPING)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    report = {"rank": rank, "steps_at_seconds": started_at, "threads": torch.get_num_threads()}
    (options.out / f"{rank}.json").write_text(json.dumps(report))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    main()
