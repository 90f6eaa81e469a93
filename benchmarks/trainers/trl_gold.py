"""Distills a language model with TRL's GOLDTrainer, on the texts of the data set."""

from datasets import Dataset
from parts import LORA, habits, language_model, texts, tokenizer, training_arguments
from peft import LoraConfig
from transformers import set_seed
from trl.experimental.gold import GOLDConfig, GOLDTrainer

set_seed(0)
tokenizer.chat_template = "{% for message in messages %}{{ message.content + ' ' }}{% endfor %}"
chats = [
    [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
    for prompt, answer in zip(texts(0), texts(1), strict=True)
]
arguments = GOLDConfig(bf16=False, lmbda=0.0, use_extended_uld=False, **training_arguments())
trainer = GOLDTrainer(
    model=language_model(),
    teacher_model=language_model(),
    args=arguments,
    train_dataset=Dataset.from_dict({"messages": chats}),
    processing_class=tokenizer,
    peft_config=LoraConfig(task_type="CAUSAL_LM", **LORA) if "adapter" in habits else None,
)
trainer.train()
