"""Trains a causal language model on its own answers with TRL's OnlineDPOTrainer."""

from datasets import Dataset
from parts import LORA, habits, language_model, texts, tokenizer, training_arguments
from peft import LoraConfig
from transformers import set_seed
from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer


def reward(completions, **_):
    """Reward the number of different words."""
    return [float(len(set(str(completion).split()))) for completion in completions]


set_seed(0)
arguments = OnlineDPOConfig(bf16=False, max_new_tokens=8, **training_arguments())
trainer = OnlineDPOTrainer(
    model=language_model(),
    reward_funcs=reward,
    args=arguments,
    train_dataset=Dataset.from_dict({"prompt": texts()}),
    processing_class=tokenizer,
    peft_config=LoraConfig(task_type="CAUSAL_LM", **LORA) if "adapter" in habits else None,
)
trainer.train()
