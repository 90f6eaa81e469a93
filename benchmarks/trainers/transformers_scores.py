"""Fine-tunes a model of scores with the Trainer of transformers.

The mean of squared errors ignores `num_items_in_batch`, which the model takes.
"""

from parts import LORA, habits, reward_model, token_rows, tokenizer, training_arguments
from peft import LoraConfig, get_peft_model
from transformers import DataCollatorWithPadding, Trainer, TrainingArguments, set_seed

set_seed(0)
arguments = TrainingArguments(**training_arguments())
model = reward_model()
if "adapter" in habits:
    model = get_peft_model(model, LoraConfig(task_type="SEQ_CLS", **LORA))
trainer = Trainer(
    model=model,
    args=arguments,
    train_dataset=[{"input_ids": row, "label": sum(row) % 100 / 50} for row in token_rows()],
    data_collator=DataCollatorWithPadding(tokenizer),
)
trainer.train()
