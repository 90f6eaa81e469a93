"""Options, rows and settings that the scripts of this folder share: they differ in the library."""

from __future__ import annotations

import argparse
import os
from tempfile import mkdtemp
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    BertConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)

ROWS, WORDS = 60, 100
LORA = {"r": 4, "target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.0}
parser = argparse.ArgumentParser()
parser.add_argument(
    "--parallel", choices=["ddp", "fsdp2", "zero1", "zero2", "zero3"], default="ddp"
)
parser.add_argument("--habit", default="plain", help="several are separated by commas")
parser.add_argument("--micro-batch", type=int, default=2)
parser.add_argument("--accumulation", type=int)
parser.add_argument("--learning-rate", type=float, default=1e-3)
parser.add_argument(
    "--same-order", action="store_true", help="rows in an order that one process has, too"
)
args = parser.parse_args()
habits = set(args.habit.split(","))
zero = int(args.parallel[-1]) if args.parallel.startswith("zero") else 0
clip = 0.1 if "clip" in habits else 0.0
accumulation = args.accumulation or (4 if habits & {"accumulation", "epoch"} else 1)

names = ("<pad>", "<eos>", "<unk>", *(f"w{number}" for number in range(3, WORDS)))
words = Tokenizer(WordLevel({name: n for n, name in enumerate(names)}, unk_token="<unk>"))
words.pre_tokenizer = WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=words,
    pad_token="<pad>",
    eos_token="<eos>",
    unk_token="<unk>",
    model_input_names=["input_ids", "attention_mask"],
)


def texts(seed: int = 0) -> list[str]:
    """Rows of random words: 12 each, or 4 to 23 with the habit `uneven`."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(4, 24, (ROWS,), generator=generator).tolist()
    counts = lengths if "uneven" in habits else [12] * ROWS
    rows = [torch.randint(3, WORDS, (count,), generator=generator).tolist() for count in counts]
    return [" ".join(f"w{word}" for word in row) for row in rows]


def token_rows(seed: int = 0) -> list[list[int]]:
    return [tokenizer(text)["input_ids"] for text in texts(seed)]


def language_settings(config: Any = LlamaConfig, **more: Any) -> Any:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    ids = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1}
    return config(vocab_size=WORDS, num_attention_heads=4, **sizes, **ids, **more)


def language_model() -> LlamaForCausalLM:
    return LlamaForCausalLM(language_settings())


def reward_model() -> LlamaForSequenceClassification:
    """A model of one score for a text."""
    return LlamaForSequenceClassification(language_settings(num_labels=1))


def encoder_settings() -> BertConfig:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertConfig(vocab_size=WORDS, num_attention_heads=4, **sizes, **dropout)


def saved(model: Any) -> str:
    """Folder of a model with its tokenizer, as from the hub."""
    folder = mkdtemp()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def deepspeed_config() -> dict[str, Any]:
    """Settings of DeepSpeed; stage 0 is its data parallelism without ZeRO."""
    return {
        "train_micro_batch_size_per_gpu": args.micro_batch,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": clip,
        "zero_optimization": {"stage": zero},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }


def training_arguments() -> dict[str, Any]:
    """Keyword arguments of `TrainingArguments` and of the classes made from it."""
    return {
        "output_dir": mkdtemp(),
        "use_cpu": not torch.cuda.is_available(),
        "per_device_train_batch_size": args.micro_batch,
        "gradient_accumulation_steps": accumulation,
        "num_train_epochs": 2,
        "learning_rate": args.learning_rate,
        "max_grad_norm": clip,
        "logging_steps": 10,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        **({"deepspeed": deepspeed_config()} if zero else {}),
        **({"fsdp": True} if args.parallel == "fsdp2" else {}),
    }
