"""Trains a causal language model with DeepSpeed's engine, which makes the data loader."""

import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch
from parts import LORA, args, deepspeed_config, habits, language_model, token_rows, tokenizer
from peft import LoraConfig, get_peft_model
from transformers import DataCollatorForLanguageModeling, set_seed

deepspeed.init_distributed(dist_backend="gloo")
set_seed(0)
model = language_model()
if "adapter" in habits:
    model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **LORA))
engine, _, loader, _ = deepspeed.initialize(
    model=model,
    optimizer=torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=args.learning_rate
    ),
    training_data=[{"input_ids": row} for row in token_rows()],
    collate_fn=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    config=deepspeed_config(),
)
for epoch in range(2):
    loader.data_sampler.set_epoch(epoch)
    for batch in loader:
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
