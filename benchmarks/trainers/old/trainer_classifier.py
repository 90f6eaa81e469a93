"""Trains a module of the user by the Trainer of transformers: it returns a loss and logits."""

import argparse

import torch
from torch import nn
from transformers import Trainer, TrainingArguments, set_seed

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=4)
parser.add_argument("--accumulate", type=int, default=4)
parser.add_argument("--lr", type=float, default=1e-3)
parser.add_argument("--clip", type=float, default=1.0)
options = parser.parse_args()


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))

    def forward(self, x, labels=None):
        logits = self.net(x)
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


set_seed(0)
generator = torch.Generator().manual_seed(1)
x = torch.randn(88, 8, generator=generator)
labels = torch.randint(0, 3, (88,), generator=generator)
rows = [{"x": x[i], "labels": labels[i]} for i in range(88)]
arguments = TrainingArguments(
    "out", per_device_train_batch_size=options.batch, num_train_epochs=2, logging_steps=1,
    gradient_accumulation_steps=options.accumulate, learning_rate=options.lr,
    max_grad_norm=options.clip, use_cpu=True, report_to=[], save_strategy="no",
    disable_tqdm=True,
)  # fmt: skip
Trainer(model=Classifier(), args=arguments, train_dataset=rows).train()
