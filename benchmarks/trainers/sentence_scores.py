"""Trains a sentence encoder on pairs with scores; the loss is a mean over pairs."""

from datasets import Dataset
from parts import LORA, ROWS, encoder_settings, habits, saved, texts, training_arguments
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
scores = [(number * 7 % ROWS) / ROWS for number in range(ROWS)]
pairs = {"sentence1": texts(0), "sentence2": texts(1), "score": scores}
trainer = SentenceTransformerTrainer(
    model=model,
    args=arguments,
    train_dataset=Dataset.from_dict(pairs),
    loss=losses.CosineSimilarityLoss(model),
)
trainer.train()
