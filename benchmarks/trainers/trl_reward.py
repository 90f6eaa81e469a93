"""Trains a reward model on preferences with TRL's RewardTrainer."""

from datasets import Dataset
from parts import LORA, habits, reward_model, texts, tokenizer, training_arguments
from peft import LoraConfig
from transformers import set_seed
from trl import RewardConfig, RewardTrainer

set_seed(0)
model = reward_model()  # once ZeRO-3 is set, its init fails
arguments = RewardConfig(bf16=False, **training_arguments())
trainer = RewardTrainer(
    model=model,
    args=arguments,
    train_dataset=Dataset.from_dict({"chosen": texts(1), "rejected": texts(2)}),
    processing_class=tokenizer,
    peft_config=LoraConfig(task_type="SEQ_CLS", **LORA) if "adapter" in habits else None,
)
trainer.train()
