"""Trains a causal language model on triple preferences with TRL's TPOTrainer."""

from datasets import Dataset
from parts import LORA, habits, language_model, texts, tokenizer, training_arguments
from peft import LoraConfig
from transformers import set_seed
from trl.experimental.tpo import TPOConfig, TPOTrainer

set_seed(0)
answers = ("chosen", "rejected", "reference")
columns = {name: [f" {text}" for text in texts(seed)] for seed, name in enumerate(answers, 1)}
arguments = TPOConfig(bf16=False, **training_arguments())
trainer = TPOTrainer(
    model=language_model(),
    args=arguments,
    train_dataset=Dataset.from_dict({"prompt": texts(), **columns}),
    processing_class=tokenizer,
    peft_config=LoraConfig(task_type="CAUSAL_LM", **LORA) if "adapter" in habits else None,
)
trainer.train()
