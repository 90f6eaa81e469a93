"""Trains a causal language model with PyTorch-Ignite's engine and its distributed helpers."""

import ignite.distributed as idist
import torch
from ignite.engine import Events, create_supervised_trainer
from parts import LORA, accumulation, args, clip, habits, language_model, token_rows, tokenizer
from peft import LoraConfig, get_peft_model
from transformers import DataCollatorForLanguageModeling, set_seed

if clip:
    raise SystemExit("Ignite's supervised trainer does not clip")


def training(_):
    set_seed(0)
    rows = [{"input_ids": row} for row in token_rows()]
    collate = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    batch_size = args.micro_batch * idist.get_world_size()  # auto_dataloader divides it
    loader = idist.auto_dataloader(
        rows, batch_size=batch_size, shuffle=not args.same_order, collate_fn=collate
    )
    model = language_model()
    if "adapter" in habits:
        model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **LORA))
    model = idist.auto_model(model)
    optimizer = idist.auto_optim(torch.optim.AdamW(model.parameters(), lr=args.learning_rate))
    trainer = create_supervised_trainer(
        model,
        optimizer,
        lambda output, _: output,
        device=idist.device(),
        prepare_batch=lambda batch, **_: (batch, None),
        model_fn=lambda model, batch: model(**batch).loss,
        gradient_accumulation_steps=accumulation,
    )

    @trainer.on(Events.EPOCH_STARTED)
    def reorder():
        if hasattr(loader.sampler, "set_epoch"):
            loader.sampler.set_epoch(trainer.state.epoch)

    trainer.run(loader, max_epochs=2)


with idist.Parallel(backend="gloo") as parallel:
    parallel.run(training)
