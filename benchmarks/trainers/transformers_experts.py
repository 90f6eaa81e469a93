"""Fine-tunes a mixture of experts, and balances them, with the Trainer of transformers."""

from parts import LORA, habits, language_settings, token_rows, tokenizer, training_arguments
from peft import LoraConfig, get_peft_model
from transformers import (
    DataCollatorForLanguageModeling,
    OlmoeConfig,
    OlmoeForCausalLM,
    Trainer,
    TrainingArguments,
    set_seed,
)

set_seed(0)
arguments = TrainingArguments(**training_arguments())
experts = {"num_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}
model = OlmoeForCausalLM(language_settings(OlmoeConfig, **experts))
if "adapter" in habits:
    model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **LORA))
trainer = Trainer(
    model=model,
    args=arguments,
    train_dataset=[{"input_ids": row} for row in token_rows()],
    data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
)
trainer.train()
