"""The loop of `loop.py` with DeepSpeed's ZeRO."""

from __future__ import annotations

import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import faults  # type: ignore[import-not-found]
import parts  # type: ignore[import-not-found]
import torch

args = faults.arguments(batch=8, workers=0, stage=2)
deepspeed.init_distributed(dist_backend="gloo")
model = parts.Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
config = {
    "train_micro_batch_size_per_gpu": args.batch,
    "zero_optimization": {"stage": args.stage},
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    "steps_per_print": 1_000_000,
}
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
step = 0
for epoch in range(1000):
    for tokens in parts.loader(parts.Texts(args.batch), args.workers):
        loss, _ = engine(tokens)
        engine.backward(loss)
        engine.step()
        step += 1
        if step % 100 == 0 and faults.RANK == 0:
            print(f"epoch {epoch} step {step} loss {loss.item():.3f}", flush=True)
