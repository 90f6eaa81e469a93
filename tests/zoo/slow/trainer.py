"""A tiny GPT-2 trained by transformers' Trainer."""

from __future__ import annotations

from tempfile import TemporaryDirectory
from typing import Any

import faults  # type: ignore[import-not-found]
import torch
from parts import WORDS, Texts  # type: ignore[import-not-found]
from torch import Tensor
from torch.utils.data import Subset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

args = faults.arguments(batch=8)
size = {"n_embd": 96, "n_layer": 3, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0}
model = GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, **size))
data = Texts(args.batch, by_batches=True)


def collate(rows: list[Tensor]) -> dict[str, Tensor]:
    tokens = torch.stack(rows)
    return {"input_ids": tokens, "labels": tokens}


class WithMetric(Trainer):  # type: ignore[misc]
    def compute_loss(self, model: Any, inputs: Any, *rest: Any, **options: Any) -> Any:
        outputs = model(**inputs)
        if model.training:
            faults.host_work(model, outputs.logits.argmax(-1), inputs["labels"])
        loss = faults.slow_backward(outputs.loss)
        return (loss, outputs) if options.get("return_outputs") else loss


evaluates = faults.has("between_steps", "evaluation")
with TemporaryDirectory() as folder:
    WithMetric(
        model=model,
        args=TrainingArguments(
            folder, per_device_train_batch_size=args.batch, per_device_eval_batch_size=args.batch,
            max_steps=100_000, learning_rate=1e-3, lr_scheduler_type="constant",
            train_sampling_strategy="sequential", eval_steps=10,
            eval_strategy="steps" if evaluates else "no",
            save_strategy="no", logging_steps=100, report_to=[], use_cpu=True, disable_tqdm=True,
        ),
        train_dataset=data,
        eval_dataset=Subset(data, range(320)),
        data_collator=collate,
    ).train()  # fmt: skip
