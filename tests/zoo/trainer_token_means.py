"""`average_tokens_across_devices=False`: each rank divides by the number of its own tokens.

The Trainer sums the tokens of the accumulated micro-batches, but not those of the ranks.
Source: huggingface/transformers#34242.
"""

import sys
from tempfile import TemporaryDirectory

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed


class Conversations(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        length = int(torch.randint(4, 24, (1,), generator=generator))
        return {"input_ids": torch.randint(0, 100, (length,), generator=generator)}


def padded(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """A batch as long as its longest sample, so that the ranks' batches have other lengths."""
    tokens = pad_sequence([sample["input_ids"] for sample in samples], batch_first=True)
    lengths = torch.tensor([[len(sample["input_ids"])] for sample in samples])
    mask = (torch.arange(tokens.shape[1]) < lengths).long()
    labels = torch.where(mask == 1, tokens, -100)
    return {"input_ids": tokens, "labels": labels, "attention_mask": mask}


def main() -> None:
    set_seed(0)
    config = GPT2Config(vocab_size=100, n_positions=32, n_embd=32, n_layer=2, n_head=2)
    with TemporaryDirectory() as directory:
        arguments = TrainingArguments(
            output_dir=directory,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            gradient_checkpointing=True,
            max_steps=6,
            learning_rate=1e-3,
            average_tokens_across_devices="--right" in sys.argv,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            logging_steps=1,
            disable_tqdm=True,
        )
        trainer = Trainer(
            model=GPT2LMHeadModel(config),
            args=arguments,
            train_dataset=Conversations(),
            data_collator=padded,
        )
        trainer.train()


if __name__ == "__main__":
    main()
