"""A training loop with HuggingFace Accelerate."""

# mypy: disable-error-code="import-untyped"

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import faults  # type: ignore[import-not-found]
import torch
from accelerate import Accelerator
from parts import Model, Texts, collate  # type: ignore[import-not-found]
from torch.utils.data import DataLoader

args = faults.arguments(batch=8, accumulate=1, sync="last")

accelerator = Accelerator(cpu=True)
data = Texts(args.batch, by_batches=True)
loader: Any = DataLoader(data, batch_size=args.batch, collate_fn=collate)
plain = Model()
model, optimizer, loader = accelerator.prepare(
    plain, torch.optim.AdamW(plain.parameters(), lr=1e-3), loader
)


step = 0
for _epoch in range(1000):
    for number, tokens in enumerate(loader, 1):
        last = number % args.accumulate == 0
        waits = args.sync == "last" and not last
        with accelerator.no_sync(model) if waits else nullcontext():
            loss, predicted = model(tokens)
            accelerator.backward(loss / args.accumulate)
        if not last:
            continue
        step += 1
        if step % 100 == 0:
            accelerator.print(f"step {step} loss {loss.item():.3f}")
        if accelerator.is_main_process and faults.has("between_steps", "print"):
            for name, p in plain.named_parameters():
                print(step, name, p.grad)
        faults.host_work(plain, predicted, tokens)
        optimizer.step()
        optimizer.zero_grad()
