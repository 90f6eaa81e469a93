"""Fine-tunes a language model as a classifier of texts with the Trainer of transformers.

The models of this kind share a forward pass, whose loss ignores `num_items_in_batch`.
"""

from parts import LORA, habits, language_settings, token_rows, tokenizer, training_arguments
from peft import LoraConfig, get_peft_model
from transformers import (
    DataCollatorWithPadding,
    LlamaForSequenceClassification,
    Trainer,
    TrainingArguments,
    set_seed,
)

set_seed(0)
model = LlamaForSequenceClassification(language_settings())  # once ZeRO-3 is set, its init fails
arguments = TrainingArguments(**training_arguments())
if "adapter" in habits:
    model = get_peft_model(model, LoraConfig(task_type="SEQ_CLS", **LORA))
trainer = Trainer(
    model=model,
    args=arguments,
    train_dataset=[{"input_ids": row, "label": sum(row) % 2} for row in token_rows()],
    data_collator=DataCollatorWithPadding(tokenizer),
)
trainer.train()
