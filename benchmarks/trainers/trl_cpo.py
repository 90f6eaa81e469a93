"""Trains a causal language model on preferences with TRL's CPOTrainer."""

from datasets import Dataset
from parts import LORA, habits, language_model, texts, tokenizer, training_arguments
from peft import LoraConfig
from transformers import set_seed
from trl.experimental.cpo import CPOConfig, CPOTrainer

set_seed(0)
answers = {"chosen": [f" {t}" for t in texts(1)], "rejected": [f" {t}" for t in texts(2)]}
arguments = CPOConfig(bf16=False, **training_arguments())
trainer = CPOTrainer(
    model=language_model(),
    args=arguments,
    train_dataset=Dataset.from_dict({"prompt": texts(), **answers}),
    processing_class=tokenizer,
    peft_config=LoraConfig(task_type="CAUSAL_LM", **LORA) if "adapter" in habits else None,
)
trainer.train()
