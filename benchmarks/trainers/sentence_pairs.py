"""Trains a sentence encoder on pairs whose other rows in the batch are the negatives."""

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
trainer = SentenceTransformerTrainer(
    model=model,
    args=arguments,
    train_dataset=Dataset.from_dict({"anchor": texts(0), "positive": texts(1)}),
    loss=losses.MultipleNegativesRankingLoss(model),
)
trainer.train()
