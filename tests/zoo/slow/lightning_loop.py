"""A training with Lightning."""

from __future__ import annotations

from tempfile import TemporaryDirectory
from typing import Any

import faults  # type: ignore[import-not-found]
import lightning as L
import parts  # type: ignore[import-not-found]
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

args = faults.arguments(batch=8, workers=0, norms="")


class Task(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = parts.Model()

    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor
        loss, self.predicted = self.net(tokens)
        self.tokens = tokens
        if batch_idx % 100 == 99 and self.global_rank == 0:
            print(f"step {batch_idx + 1} loss {loss.item():.3f}", flush=True)
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        faults.host_work(self.net, self.predicted, self.tokens)
        if args.norms:
            for name, p in self.net.named_parameters():
                self.log(f"norm/{name}", p.grad.norm(), sync_dist=args.norms == "all")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


loader = parts.loader(parts.Texts(args.batch), args.workers)
checkpoints = faults.has("between_steps", "checkpoint")
with TemporaryDirectory() as folder:
    saves = ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=1, save_last=True)
    L.Trainer(
        accelerator="cpu", devices=faults.WORLD, strategy="ddp", max_epochs=1000,
        use_distributed_sampler=False,
        callbacks=[saves] if checkpoints else [], enable_checkpointing=checkpoints,
        logger=False, enable_progress_bar=False, enable_model_summary=False,
    ).fit(Task(), loader)  # fmt: skip
