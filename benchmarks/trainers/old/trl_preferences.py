"""Trains a small language model on preferences by a trainer of TRL: DPO or ORPO."""

import argparse
import random

import trl
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

parser = argparse.ArgumentParser()
parser.add_argument("--method", default="DPO")
parser.add_argument("--batch", type=int, default=2)
parser.add_argument("--accumulate", type=int, default=4)
parser.add_argument("--lr", type=float, default=1e-3)
parser.add_argument("--clip", type=float, default=1.0)
options = parser.parse_args()

set_seed(0)
words = [f"w{i}" for i in range(100)]
vocabulary = {word: i for i, word in enumerate(["<pad>", "<s>", "</s>", "<unk>", *words])}
tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>",
    unk_token="<unk>",
)  # fmt: skip
draw = random.Random(1)
rows = [
    {name: " ".join(draw.choices(words, k=draw.randint(3, 12))) for name in names}
    for names in [("prompt", "chosen", "rejected")] * 64
]
config = LlamaConfig(
    vocab_size=len(vocabulary), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=64,
    pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
arguments = getattr(trl, f"{options.method}Config")(
    "out", per_device_train_batch_size=options.batch, num_train_epochs=1, logging_steps=1,
    gradient_accumulation_steps=options.accumulate, learning_rate=options.lr,
    max_grad_norm=options.clip, use_cpu=True, report_to=[], save_strategy="no",
    disable_tqdm=True, bf16=False,
)  # fmt: skip
getattr(trl, f"{options.method}Trainer")(
    model=LlamaForCausalLM(config), args=arguments, train_dataset=Dataset.from_list(rows),
    processing_class=tokenizer,
).train()  # fmt: skip
