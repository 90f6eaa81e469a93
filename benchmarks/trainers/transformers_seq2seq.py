"""Fine-tunes an encoder-decoder with the Seq2SeqTrainer of transformers."""

from parts import LORA, WORDS, habits, token_rows, tokenizer, training_arguments
from peft import LoraConfig, get_peft_model
from transformers import (
    DataCollatorForSeq2Seq,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    set_seed,
)

set_seed(0)
arguments = Seq2SeqTrainingArguments(**training_arguments())
sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
model = T5ForConditionalGeneration(
    T5Config(vocab_size=WORDS, dropout_rate=0.0, decoder_start_token_id=0, **sizes)
)
if "adapter" in habits:
    targets = {"target_modules": ["q", "v"]}
    model = get_peft_model(model, LoraConfig(task_type="SEQ_2_SEQ_LM", **{**LORA, **targets}))
pairs = zip(token_rows(0), token_rows(1), strict=True)
trainer = Seq2SeqTrainer(
    model=model,
    args=arguments,
    train_dataset=[{"input_ids": source, "labels": target} for source, target in pairs],
    data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
)
trainer.train()
