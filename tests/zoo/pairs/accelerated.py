"""The loop of `loop.py` with Accelerate."""

# mypy: disable-error-code="import-untyped"

from __future__ import annotations

import sys
from typing import Any

import parts  # type: ignore[import-not-found]
import torch
import torch.nn.functional as F
from accelerate import Accelerator

accelerator = Accelerator(cpu=True)
plain = parts.model()
vectors = [p for p in plain.parameters() if p.dim() < 2]
matrices = [p for p in plain.parameters() if p.dim() > 1]
groups: list[dict[str, Any]] = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1)
loader = parts.loader(parts.dataset(), 16)
model, optimizer = accelerator.prepare(plain, optimizer)
torch.manual_seed(100 + parts.RANK)
for inputs, targets in loader:
    loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    accelerator.backward(loss)
    if "--clip" in sys.argv:
        accelerator.clip_grad_norm_(model.parameters(), 0.05)
    optimizer.step()
    optimizer.zero_grad()
