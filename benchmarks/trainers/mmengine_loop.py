"""Trains a causal language model with MMEngine's Runner."""

import os
from tempfile import mkdtemp

from mmengine.model import BaseModel
from mmengine.runner import Runner
from parts import accumulation, args, clip, language_model, token_rows, tokenizer
from transformers import DataCollatorForLanguageModeling

collate = DataCollatorForLanguageModeling(tokenizer, mlm=False)


class Language(BaseModel):
    def __init__(self):
        super().__init__()
        self.model = language_model()

    def forward(self, **batch):
        del batch["mode"]
        return {"loss": self.model(**batch).loss}


loader = {
    "batch_size": args.micro_batch,
    "num_workers": 0,
    "dataset": [{"input_ids": row} for row in token_rows()],
    "sampler": {"type": "DefaultSampler", "shuffle": True},
    "collate_fn": collate,
}
runner = Runner(
    model=Language(),
    work_dir=mkdtemp(),
    train_dataloader=loader,
    optim_wrapper={
        "optimizer": {"type": "AdamW", "lr": args.learning_rate},
        "accumulative_counts": accumulation,
        **({"clip_grad": {"max_norm": clip}} if clip else {}),
    },
    train_cfg={"by_epoch": True, "max_epochs": 2},
    launcher="pytorch" if "WORLD_SIZE" in os.environ else "none",
    env_cfg={"dist_cfg": {"backend": "gloo"}},
    randomness={"seed": 0},
    default_hooks={"checkpoint": None},
)
runner.train()
