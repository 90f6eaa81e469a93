"""A small GPT-2 trained by transformers' Trainer, or by a plain loop that does the same."""

from __future__ import annotations

import sys
from tempfile import TemporaryDirectory
from typing import Any

import parts  # type: ignore[import-not-found]
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


class Texts(Dataset[dict[str, Tensor]]):
    def __init__(self) -> None:
        (self.tokens, _) = parts.dataset().tensors
        self.labels = self.tokens.clone()
        self.labels[:, 0] = -100  # the Trainer counts the first target, which the loss leaves out

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.labels[index]}


def model() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    size = {"n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2}
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=parts.WORDS, **size, **dropout))


class InOrder(Trainer):  # type: ignore[misc]
    """Takes the samples in their order, so that a plain loop can do the same."""

    def _get_train_sampler(self, *_: Any) -> None:
        return None


def by_trainer(clip: float) -> None:
    with TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=8,
            max_steps=6,
            learning_rate=1e-3,
            lr_scheduler_type="constant",
            weight_decay=0.1 if "--all-decay" not in sys.argv else 0.2,
            max_grad_norm=clip,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        )
        InOrder(model=model(), args=arguments, train_dataset=Texts()).train()


def by_hand() -> None:
    dist.init_process_group("gloo")
    plain = model()
    ddp = nn.parallel.DistributedDataParallel(plain)
    named = [(name, p) for name, p in plain.named_parameters()]
    decayed = [p for name, p in named if not name.endswith("bias") and ".ln_" not in name]
    rest = [p for name, p in named if name.endswith("bias") or ".ln_" in name]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    texts = Texts()
    for step in range(6):
        first = 8 * (2 * step + parts.RANK)  # Accelerate gives the ranks whole batches in turn
        tokens, labels = (values[first : first + 8] for values in (texts.tokens, texts.labels))
        loss = ddp(input_ids=tokens, labels=labels).loss
        loss.backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    if "--by-hand" in sys.argv:
        by_hand()
    else:
        by_trainer(0.0 if "--no-clip" in sys.argv else 1.0)
