"""A plain training loop with many switches: each pair of commands differs in one of them."""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import argparse
import copy
import io
from collections.abc import Callable
from typing import Any

import parts  # type: ignore[import-not-found]
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint


class LowPrecisionAdamW(torch.optim.Optimizer):
    """AdamW whose moments are kept in bf16 or in fp32."""

    def __init__(self, parameters: Any, dtype: torch.dtype) -> None:
        super().__init__(parameters, {"lr": 1e-2, "weight_decay": 0.01})
        self.dtype = dtype

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["count"] = 0
                    state["m"] = torch.zeros_like(p, dtype=self.dtype)
                    state["v"] = torch.zeros_like(p, dtype=self.dtype)
                state["count"] += 1
                n = state["count"]
                state["m"].lerp_(p.grad.to(self.dtype), 0.1)
                state["v"].mul_(0.99).add_(0.01 * p.grad.square().to(self.dtype))
                m, v = state["m"].float() / (1 - 0.9**n), state["v"].float() / (1 - 0.99**n)
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(group["lr"] * m / (v.sqrt() + 1e-8))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", default="ddp", choices=["ddp", "fsdp", "none"])
    parser.add_argument("--optimizer", default="adamw", choices=["adamw", "sgd", "fp32", "bf16"])
    for name, value in {
        "batch": 16, "accumulate": 1, "seed": 0, "start-seed": 0, "workers": 0, "bucket-mb": 25.0,
        "eps": 1e-8, "beta": 0.9, "dampening": 0.0, "dropout": 0.1, "smoothing": 0.0,
        "auxiliary": 0.0, "clip": 0.0, "warmup": 0, "warmup-step": 1, "resume-after": 0, "split": 1,
    }.items():  # fmt: skip
        parser.add_argument(f"--{name}", type=type(value), default=value)
    for switch in (
        *("static-graph", "fused", "foreach", "own-loss", "checkpoint", "keep-gradients"),
        *("own-clip", "all-decay", "untied", "freeze", "average", "by-ranks", "padded"),
        *("micro-means", "count-padding", "sequence-means", "mixup", "scale-inputs", "rounded"),
        *("short-window", "compile", "no-zero", "new-state", "gelu", "renamed"),
    ):
        parser.add_argument(f"--{switch}", action="store_true")
    return parser.parse_args()


def wrapped(args: argparse.Namespace, model: nn.Module) -> nn.Module:
    if args.strategy == "fsdp":
        for block in model.blocks:  # type: ignore[union-attr]
            fully_shard(block)
        fully_shard(model)
    elif args.strategy == "ddp":
        model = nn.parallel.DistributedDataParallel(
            model, bucket_cap_mb=args.bucket_mb, static_graph=args.static_graph
        )
        if args.rounded:
            from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

            model.register_comm_hook(None, bf16_compress_hook)
    return torch.compile(model) if args.compile else model  # type: ignore[return-value]


def optimizer_for(args: argparse.Namespace, model: nn.Module) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices, vectors = [p for p in trained if p.dim() > 1], [p for p in trained if p.dim() < 2]
    decay = 0.1 if args.all_decay else 0.0
    groups: list[dict[str, Any]] = [
        {"params": matrices},
        {"params": vectors, "weight_decay": decay},
    ]
    if args.optimizer == "sgd":
        return torch.optim.SGD(trained, lr=0.1, momentum=0.9, dampening=args.dampening)
    if args.optimizer in {"fp32", "bf16"}:
        dtype = torch.bfloat16 if args.optimizer == "bf16" else torch.float32
        return LowPrecisionAdamW(trained, dtype)
    return torch.optim.AdamW(
        groups, lr=1e-2, betas=(args.beta, 0.999), eps=args.eps, weight_decay=0.1,
        fused=args.fused or None, foreach=args.foreach or None,
    )  # fmt: skip


def loss_of(args: argparse.Namespace, logits: Tensor, targets: Tensor) -> Tensor:
    """Mean over the targets that count."""
    if args.own_loss:
        chosen = targets.clamp(min=0)[..., None]
        losses = -logits.log_softmax(-1).gather(-1, chosen)[..., 0]
        return losses[targets >= 0].mean()
    if args.sequence_means:
        by_token = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
        counts = (targets >= 0).sum(1).clamp(min=1)
        return (by_token.sum(1) / counts).mean()
    if args.count_padding:
        targets = targets.clamp(min=0)
    loss: Tensor = F.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), label_smoothing=args.smoothing
    )
    return loss


def forward_of(args: argparse.Namespace, model: nn.Module) -> Callable[[Tensor], Tensor]:
    if args.checkpoint:
        return lambda inputs: checkpoint(model, inputs, use_reentrant=False)
    return model


def main() -> None:
    args = arguments()
    if args.strategy != "none":
        dist.init_process_group("gloo")
    plain = parts.model(args.dropout, tied=not args.untied, seed=args.start_seed)
    for block in plain.blocks:
        block.activation = F.gelu if args.gelu else torch.relu
        if args.renamed:
            block.rename()
    if args.freeze:
        plain.blocks[1].requires_grad_(False)
    model = wrapped(args, plain)
    optimizer = optimizer_for(args, plain)
    average = copy.deepcopy(plain) if args.average else None
    data = parts.dataset(padded=args.padded)
    loader = parts.loader(data, args.batch // args.accumulate, seed=args.seed, workers=args.workers)
    schedule = schedule_for(args, optimizer)
    torch.manual_seed(100 + parts.RANK)
    forward = forward_of(args, model)
    batches = list(loader)
    if args.short_window:
        batches = batches[: 2 * args.accumulate + 1]
    for first in range(0, len(batches), args.accumulate):
        backward(args, plain, forward, batches[first : first + args.accumulate])
        clip(args, plain)
        optimizer.step()
        if not args.no_zero:
            optimizer.zero_grad(set_to_none=not args.keep_gradients)
        if args.new_state:
            optimizer = optimizer_for(args, plain)
            schedule = schedule_for(args, optimizer)
        if first + args.accumulate == args.resume_after * args.accumulate:
            plain, model, optimizer = resumed(args, plain, optimizer)
            forward, schedule = forward_of(args, model), schedule_for(args, optimizer)
        for _ in range(args.warmup_step):
            schedule.step()
        if average is not None:
            with torch.no_grad():
                for mean, p in zip(average.parameters(), plain.parameters(), strict=True):
                    mean.lerp_(p, 0.1)


def schedule_for(args: argparse.Namespace, optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / args.warmup) if args.warmup else 1.0
    )


def resumed(
    args: argparse.Namespace, plain: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[Any, nn.Module, torch.optim.Optimizer]:
    """A new model and optimizer with the states of the old ones, as after a restart."""
    file = io.BytesIO()
    torch.save((plain.state_dict(), optimizer.state_dict()), file)
    file.seek(0)
    weights, state = torch.load(file)
    generator = torch.get_rng_state()
    again = parts.model(args.dropout, tied=not args.untied, seed=5)
    again.load_state_dict(weights)
    model = wrapped(args, again)
    new = optimizer_for(args, again)
    new.load_state_dict(state)
    torch.set_rng_state(generator)
    return again, model, new


def backward(
    args: argparse.Namespace,
    plain: Any,
    forward: Callable[[Tensor], Tensor],
    window: list[tuple[Tensor, Tensor]],
) -> None:
    """Add up the gradients of a step's micro-batches."""
    chunks = [[tensor.chunk(args.split) for tensor in batch] for batch in window]
    window = [pair for batch in chunks for pair in zip(*batch, strict=True)]
    count = sum(int((targets >= 0).sum()) for _, targets in window)
    for inputs, targets in window:
        loss = loss_of(args, forward(inputs), targets)
        if args.micro_means or not args.padded:
            share = 1 / (len(window) if args.by_ranks else args.accumulate * args.split)
        else:
            share = int((targets >= 0).sum()) / count
        if args.auxiliary:
            term = plain.blocks[0].up(torch.ones(1, parts.WIDTH)).square().mean()
            loss = loss + args.auxiliary * (parts.WORLD if args.by_ranks else 1) * term
        (loss * share).backward()


def clip(args: argparse.Namespace, plain: Any) -> None:
    if args.clip and args.own_clip:
        norm = torch.stack([p.grad.norm() for p in plain.parameters()]).norm()
        for p in plain.parameters():
            p.grad.mul_(min(1.0, args.clip / (float(norm) + 1e-6)))
    elif args.clip:
        nn.utils.clip_grad_norm_(plain.parameters(), args.clip)


if __name__ == "__main__":
    main()
