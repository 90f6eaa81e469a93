"""Trains a causal language model on answers that are good or bad with TRL's KTOTrainer."""

from datasets import Dataset
from parts import LORA, ROWS, habits, language_model, saved, texts, tokenizer, training_arguments
from peft import LoraConfig
from transformers import set_seed
from trl import KTOConfig, KTOTrainer

set_seed(0)
folder = saved(language_model())
columns = {
    "prompt": texts(),
    "completion": [f" {text}" for text in texts(1)],
    "label": [number % 3 > 0 for number in range(ROWS)],
}
arguments = KTOConfig(bf16=False, **training_arguments())
trainer = KTOTrainer(
    model=folder,
    args=arguments,
    train_dataset=Dataset.from_dict(columns),
    processing_class=tokenizer,
    peft_config=LoraConfig(task_type="CAUSAL_LM", **LORA) if "adapter" in habits else None,
)
trainer.train()
