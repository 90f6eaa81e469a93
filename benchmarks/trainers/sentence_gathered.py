"""Trains a sentence encoder on pairs whose negatives are the other rows of all ranks, cached."""

from datasets import Dataset
from parts import LORA, encoder_settings, habits, saved, texts, training_arguments
from peft import LoraConfig
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
    losses,
)
from transformers import BertModel, set_seed

set_seed(0)
folder = saved(BertModel(encoder_settings()))  # later, only rank 0 saves
arguments = SentenceTransformerTrainingArguments(**training_arguments())
model = SentenceTransformer(folder, device="cpu")
if "adapter" in habits:
    model.add_adapter(LoraConfig(**{**LORA, "target_modules": ["query", "value"]}))
loss = losses.CachedMultipleNegativesRankingLoss(
    model, mini_batch_size=1, gather_across_devices=True
)
trainer = SentenceTransformerTrainer(
    model=model,
    args=arguments,
    train_dataset=Dataset.from_dict({"anchor": texts(0), "positive": texts(1)}),
    loss=loss,
)
trainer.train()
