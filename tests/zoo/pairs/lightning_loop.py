"""The loop of `loop.py` with Lightning."""

from __future__ import annotations

import os
import sys
from typing import Any

import lightning as L
import parts  # type: ignore[import-not-found]
import torch
import torch.nn.functional as F
from torch import Tensor


class Task(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = parts.model()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        inputs, targets = batch
        return F.cross_entropy(self.net(inputs).flatten(0, 1), targets.flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        matrices = [p for p in self.parameters() if p.dim() > 1]
        vectors = [p for p in self.parameters() if p.dim() < 2]
        groups: list[dict[str, Any]] = [
            {"params": matrices},
            {"params": vectors, "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1)

    def on_train_start(self) -> None:
        torch.manual_seed(100 + parts.RANK)


trainer = L.Trainer(
    accelerator="cpu",
    devices=int(os.environ.get("WORLD_SIZE", "1")),
    strategy="ddp",
    max_epochs=1,
    gradient_clip_val=0.05 if "--clip" in sys.argv else None,
    use_distributed_sampler=False,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Task(), parts.loader(parts.dataset(), 16))
