"""Trains a causal language model on preferences with TRL's DPOTrainer."""

from datasets import Dataset
from parts import LORA, habits, language_model, saved, texts, tokenizer, training_arguments
from peft import LoraConfig
from transformers import set_seed
from trl import DPOConfig, DPOTrainer

set_seed(0)
folder = saved(language_model())
answers = {"chosen": [f" {t}" for t in texts(1)], "rejected": [f" {t}" for t in texts(2)]}
arguments = DPOConfig(bf16=False, **training_arguments())
trainer = DPOTrainer(
    model=folder,
    args=arguments,
    train_dataset=Dataset.from_dict({"prompt": texts(), **answers}),
    processing_class=tokenizer,
    peft_config=LoraConfig(task_type="CAUSAL_LM", **LORA) if "adapter" in habits else None,
)
trainer.train()
