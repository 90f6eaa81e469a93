"""Trains a causal language model with SpeechBrain's Brain."""

import speechbrain
import torch
from parts import LORA, accumulation, args, clip, habits, language_model, token_rows, tokenizer
from peft import LoraConfig, get_peft_model
from transformers import DataCollatorForLanguageModeling, set_seed


class Language(speechbrain.Brain):
    def compute_forward(self, batch, *_):
        return self.modules.model(**batch).loss

    def compute_objectives(self, predictions, *_):
        return predictions


options = {"device": "cpu", "distributed_backend": "gloo", "grad_accumulation_factor": accumulation}
options |= {"max_grad_norm": clip} if clip else {}
speechbrain.utils.distributed.ddp_init_group(options)
set_seed(0)
model = language_model()
if "adapter" in habits:
    model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **LORA))
brain = Language(
    modules={"model": model},
    hparams={"seed": 0},
    opt_class=lambda parameters: torch.optim.AdamW(parameters, lr=args.learning_rate),
    run_opts=options,
)
collate = DataCollatorForLanguageModeling(tokenizer, mlm=False)
brain.fit(
    epoch_counter=range(1, 3),
    train_set=[{"input_ids": row} for row in token_rows()],
    train_loader_kwargs={"batch_size": args.micro_batch, "shuffle": True, "collate_fn": collate},
    progressbar=False,
)
