"""The loop of `loop.py` with DeepSpeed's ZeRO."""

from __future__ import annotations

import os
import sys
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import parts  # type: ignore[import-not-found]
import torch
import torch.nn.functional as F

stage = int(sys.argv[1])
deepspeed.init_distributed(dist_backend="gloo")
plain = parts.model()
vectors = [p for p in plain.parameters() if p.dim() < 2]
matrices = [p for p in plain.parameters() if p.dim() > 1]
groups: list[dict[str, Any]] = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1)
config = {
    "train_micro_batch_size_per_gpu": 16,
    "gradient_clipping": 0.05 if "--clip" in sys.argv else 0.0,
    "zero_optimization": {"stage": stage},
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}
engine, *_ = deepspeed.initialize(model=plain, optimizer=optimizer, config=config)
torch.manual_seed(100 + parts.RANK)
for inputs, targets in parts.loader(parts.dataset(), 16):
    loss = F.cross_entropy(engine(inputs).flatten(0, 1), targets.flatten())
    engine.backward(loss)
    engine.step()
