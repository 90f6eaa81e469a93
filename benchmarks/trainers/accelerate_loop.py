"""Trains a causal language model in a loop with Accelerate."""

import torch
from accelerate import Accelerator, DeepSpeedPlugin, PartialState
from accelerate.utils import DataLoaderConfiguration, set_seed
from parts import (
    LORA,
    accumulation,
    args,
    clip,
    deepspeed_config,
    habits,
    language_model,
    token_rows,
    tokenizer,
    zero,
)
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import DataCollatorForLanguageModeling

set_seed(0)
PartialState(cpu=not torch.cuda.is_available())
plugin = DeepSpeedPlugin(hf_ds_config=deepspeed_config()) if zero else None
accelerator = Accelerator(
    gradient_accumulation_steps=accumulation,
    deepspeed_plugin=plugin,
    dataloader_config=DataLoaderConfiguration(use_seedable_sampler=args.same_order),
)
model = language_model()
if "adapter" in habits:
    model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **LORA))
optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
rows = [{"input_ids": row} for row in token_rows()]
collate = DataCollatorForLanguageModeling(tokenizer, mlm=False)
loader = DataLoader(rows, batch_size=args.micro_batch, shuffle=True, collate_fn=collate)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for _epoch in range(2):
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients and clip:
                accelerator.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
