"""Trains a small language model by the GRPOTrainer of TRL on a reward for different words."""

import argparse
import random

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import GRPOConfig, GRPOTrainer

parser = argparse.ArgumentParser()
parser.add_argument("--accumulate", type=int, default=2)
parser.add_argument("--steps-per-generation", type=int, default=4)
parser.add_argument("--lr", type=float, default=1e-3)
options = parser.parse_args()

set_seed(0)
words = [f"w{i}" for i in range(20)]
vocabulary = {word: i for i, word in enumerate(["<pad>", "<s>", "</s>", "<unk>", *words])}
tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>",
    unk_token="<unk>", padding_side="left",
)  # fmt: skip
draw = random.Random(1)
prompts = [{"prompt": " ".join(draw.choices(words, k=draw.randint(3, 6)))} for _ in range(64)]


def different_words(completions, **kwargs):
    return [float(len(set(completion.split()))) for completion in completions]


config = LlamaConfig(
    vocab_size=len(vocabulary), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=64,
    pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
arguments = GRPOConfig(
    "out", per_device_train_batch_size=4, num_generations=4, max_completion_length=12,
    gradient_accumulation_steps=options.accumulate, learning_rate=options.lr,
    steps_per_generation=options.steps_per_generation, num_train_epochs=1, logging_steps=1,
    use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True, bf16=False,
)  # fmt: skip
GRPOTrainer(
    model=LlamaForCausalLM(config), args=arguments, reward_funcs=different_words,
    train_dataset=Dataset.from_list(prompts), processing_class=tokenizer,
).train()  # fmt: skip
