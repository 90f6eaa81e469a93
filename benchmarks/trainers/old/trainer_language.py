"""Trains a small language model by the Trainer of transformers, on rows of several lengths."""

import argparse

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=4)
parser.add_argument("--accumulate", type=int, default=4)
parser.add_argument("--lr", type=float, default=1e-3)
parser.add_argument("--clip", type=float, default=1.0)
parser.add_argument("--rows", type=int, default=96)
options = parser.parse_args()

set_seed(0)
generator = torch.Generator().manual_seed(1)
lengths = torch.randint(4, 40, (options.rows,), generator=generator).tolist()
rows = [{"input_ids": torch.randint(1, 128, (n,), generator=generator)} for n in lengths]


def collate(batch):
    ids = pad_sequence([row["input_ids"] for row in batch], batch_first=True)
    labels = ids.masked_fill(ids == 0, -100)
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": labels}


config = LlamaConfig(
    vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=64,
)  # fmt: skip
arguments = TrainingArguments(
    "out", per_device_train_batch_size=options.batch, num_train_epochs=2, logging_steps=1,
    gradient_accumulation_steps=options.accumulate, learning_rate=options.lr,
    max_grad_norm=options.clip, use_cpu=True, report_to=[], save_strategy="no",
    disable_tqdm=True,
)  # fmt: skip
model = LlamaForCausalLM(config)
Trainer(model=model, args=arguments, train_dataset=rows, data_collator=collate).train()
