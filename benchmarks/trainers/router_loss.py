"""Prints the gradient that a router gets from the Trainer of transformers, all rows being equal.

    torchrun --nproc-per-node 2 benchmarks/trainers/router_loss.py --micro-batch 2 --accumulation 4
    torchrun --nproc-per-node 1 benchmarks/trainers/router_loss.py --micro-batch 16
    torchrun --nproc-per-node 1 benchmarks/trainers/router_loss.py --micro-batch 16 --weight 0.08

The first two lines must be equal.  The first is equal to the third: the router's loss is added to
one that is divided by the targets of all ranks and micro-batches, and weighs 8 times as much.
"""

import argparse
import os
from tempfile import mkdtemp

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers import OlmoeConfig, OlmoeForCausalLM, Trainer, TrainingArguments, set_seed

parser = argparse.ArgumentParser()
parser.add_argument("--micro-batch", type=int, default=2)
parser.add_argument("--accumulation", type=int, default=1)
parser.add_argument("--weight", type=float, default=0.01, help="the default of OlmoeConfig")
options = parser.parse_args()

set_seed(0)
arguments = TrainingArguments(
    mkdtemp(),
    use_cpu=True,
    per_device_train_batch_size=options.micro_batch,
    gradient_accumulation_steps=options.accumulation,
    max_grad_norm=0.0,
    report_to=[],
)
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
experts = {"num_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": options.weight}
ids = {"vocab_size": 100, "num_attention_heads": 4, "pad_token_id": 0, "eos_token_id": 1}
model = OlmoeForCausalLM(OlmoeConfig(**sizes, **experts, **ids, output_router_logits=True))
row = torch.randint(3, 100, (12,), generator=torch.Generator().manual_seed(0))


def show(*_):
    gradients = [p.grad.flatten() for name, p in model.named_parameters() if "gate.weight" in name]
    if os.environ["RANK"] == "0":
        print(f"norm of the routers' gradient: {torch.cat(gradients).norm():.6g}", flush=True)
    os._exit(0)


register_optimizer_step_pre_hook(show)
rows = [{"input_ids": row, "labels": row}] * 64
Trainer(model=model, args=arguments, train_dataset=rows).train()
