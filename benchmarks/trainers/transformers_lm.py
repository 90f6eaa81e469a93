"""Fine-tunes a causal language model with the Trainer of transformers.

The model takes `num_items_in_batch`, the number of targets of all micro-batches of a step.
"""

from parts import LORA, habits, language_model, token_rows, tokenizer, training_arguments
from peft import LoraConfig, get_peft_model
from transformers import DataCollatorForLanguageModeling, Trainer, TrainingArguments, set_seed

set_seed(0)
arguments = TrainingArguments(**training_arguments())
model = language_model()
if "adapter" in habits:
    model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **LORA))
trainer = Trainer(
    model=model,
    args=arguments,
    train_dataset=[{"input_ids": row} for row in token_rows()],
    data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
)
trainer.train()
