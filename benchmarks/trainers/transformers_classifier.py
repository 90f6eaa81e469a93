"""Fine-tunes a classifier of sentences with the Trainer of transformers.

The model takes `**kwargs`, and its loss ignores `num_items_in_batch`.
"""

from parts import LORA, encoder_settings, habits, token_rows, tokenizer, training_arguments
from peft import LoraConfig, get_peft_model
from transformers import (
    BertForSequenceClassification,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
    set_seed,
)

set_seed(0)
arguments = TrainingArguments(**training_arguments())
model = BertForSequenceClassification(encoder_settings())
if "adapter" in habits:
    targets = {"target_modules": ["query", "value"]}
    model = get_peft_model(model, LoraConfig(task_type="SEQ_CLS", **{**LORA, **targets}))
rows = token_rows()
trainer = Trainer(
    model=model,
    args=arguments,
    train_dataset=[{"input_ids": row, "label": sum(row) % 2} for row in rows],
    data_collator=DataCollatorWithPadding(tokenizer),
)
trainer.train()
