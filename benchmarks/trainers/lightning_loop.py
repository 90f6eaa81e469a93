"""Trains a causal language model with Lightning's Trainer."""

import os

import lightning
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from parts import LORA, accumulation, args, clip, habits, language_model, token_rows, tokenizer
from peft import LoraConfig, get_peft_model
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader
from transformers import DataCollatorForLanguageModeling


class Language(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = language_model()
        if "adapter" in habits:
            self.model = get_peft_model(self.model, LoraConfig(task_type="CAUSAL_LM", **LORA))

    def configure_model(self):
        if args.parallel == "fsdp2":
            fully_shard(self.model, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch, _):
        return self.model(**batch).loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=args.learning_rate)


lightning.seed_everything(0)
ranks = int(os.environ.get("WORLD_SIZE", "1"))
fsdp2 = ModelParallelStrategy(data_parallel_size=ranks, tensor_parallel_size=1)
rows = [{"input_ids": row} for row in token_rows()]
collate = DataCollatorForLanguageModeling(tokenizer, mlm=False)
loader = DataLoader(rows, batch_size=args.micro_batch, shuffle=True, collate_fn=collate)
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=ranks,
    strategy=fsdp2 if args.parallel == "fsdp2" else "ddp",
    max_epochs=2,
    accumulate_grad_batches=accumulation,
    gradient_clip_val=clip or None,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Language(), loader)
