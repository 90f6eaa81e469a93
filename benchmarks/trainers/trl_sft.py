"""Fine-tunes a causal language model with TRL's SFTTrainer."""

from datasets import Dataset
from parts import LORA, habits, language_model, texts, tokenizer, training_arguments
from peft import LoraConfig
from transformers import set_seed
from trl import SFTConfig, SFTTrainer

set_seed(0)
arguments = SFTConfig(bf16=False, **training_arguments())
trainer = SFTTrainer(
    model=language_model(),
    args=arguments,
    train_dataset=Dataset.from_dict({"text": texts()}),
    processing_class=tokenizer,
    peft_config=LoraConfig(task_type="CAUSAL_LM", **LORA) if "adapter" in habits else None,
)
trainer.train()
