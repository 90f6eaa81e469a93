"""Table of the pairs: two commands, and the difference between what they train."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Commands A and B of two ranks, and the name of their difference; empty for none."""

    name: str
    a: str
    b: str
    difference: str = ""
    ranks: tuple[int, int] = (2, 2)


def _of(name: str, a: str, b: str, difference: str = "") -> Pair:
    return Pair(name=name, a=a, b=b, difference=difference)


PAIRS = (
    _of("another way to shard", "loop.py", "loop.py --strategy fsdp"),
    _of("small buckets", "loop.py", "loop.py --bucket-mb 0.01"),
    _of("static graph", "loop.py --dropout 0", "loop.py --dropout 0 --static-graph"),
    _of("compiled", "loop.py", "loop.py --compile"),
    _of("fused optimizer", "loop.py", "loop.py --fused"),
    _of("optimizer by foreach", "loop.py --foreach", "loop.py --strategy fsdp --fused"),
    _of("loss written by hand", "loop.py --padded", "loop.py --padded --own-loss"),
    _of("workers of the loader", "loop.py", "loop.py --workers 2"),
    _of("micro-batches", "loop.py", "loop.py --accumulate 4"),
    _of("micro-batches of a loaded batch", "loop.py", "loop.py --split 4"),
    _of(
        "micro-batches of FSDP",
        "loop.py --accumulate 4",
        "loop.py --strategy fsdp --accumulate 4",
    ),
    _of("checkpointed activations", "loop.py", "loop.py --checkpoint"),
    _of("gradients set to zero", "loop.py", "loop.py --keep-gradients"),
    _of("clipping written by hand", "loop.py --clip 0.05", "loop.py --clip 0.05 --own-clip"),
    _of("channels last", "images.py", "images.py --channels-last"),
    _of("Accelerate", "loop.py", "accelerated.py"),
    _of("Lightning", "loop.py", "lightning_loop.py"),
    _of("ZeRO-1", "loop.py", "deepspeed_loop.py 1"),
    _of("ZeRO-2", "loop.py", "deepspeed_loop.py 2"),
    _of("ZeRO-3", "loop.py --strategy fsdp", "deepspeed_loop.py 3"),
    _of("Trainer", "trainer.py --by-hand", "trainer.py"),
    _of("resumed", "loop.py", "loop.py --resume-after 1"),
    Pair(
        name="one rank and two",
        a="loop.py --strategy none --batch 32",
        b="loop.py",
        ranks=(1, 2),
    ),
    Pair(
        name="two ranks and one",
        a="loop.py --strategy fsdp",
        b="loop.py --strategy none --batch 32",
        ranks=(2, 1),
    ),
    _of("renamed in another order", "loop.py", "loop.py --renamed"),
    _of("another batch", "loop.py", "loop.py --batch 32", "batch"),
    _of("state in bf16", "loop.py --optimizer fp32", "loop.py --optimizer bf16", "state_type"),
    _of("decay of norms", "loop.py", "loop.py --strategy fsdp --all-decay", "weight_decay"),
    _of("clipping in DeepSpeed", "loop.py", "deepspeed_loop.py 2 --clip", "clipping"),
    _of("clipping in the Trainer", "trainer.py --no-clip", "trainer.py", "clipping"),
    _of(
        "means of micro-batches",
        "loop.py --padded --accumulate 4 --dropout 0",
        "loop.py --padded --accumulate 4 --dropout 0 --micro-means",
        "weighting",
    ),
    _of("label smoothing", "loop.py", "loop.py --smoothing 0.1", "loss_options"),
    _of("padding counted", "loop.py --padded", "loop.py --padded --count-padding", "targets"),
    _of("means of sequences", "loop.py --padded", "loop.py --padded --sequence-means", "loss"),
    _of(
        "schedule stepped by rank",
        "loop.py --warmup 8",
        "loop.py --warmup 8 --warmup-step 2",
        "schedule",
    ),
    _of("eps", "loop.py", "loop.py --eps 1e-6", "optimizer_setting"),
    _of("betas", "loop.py", "loop.py --beta 0.95", "optimizer_setting"),
    _of(
        "dampening",
        "loop.py --optimizer sgd",
        "loop.py --optimizer sgd --dampening 0.9",
        "optimizer_setting",
    ),
    _of("dropout lost", "loop.py", "loop.py --strategy fsdp --dropout 0", "dropout"),
    _of("tie lost", "loop.py", "loop.py --untied", "tied_weights"),
    _of("frozen block trained", "loop.py --freeze", "loop.py", "frozen"),
    _of("no average", "loop.py --average", "loop.py", "average"),
    _of(
        "auxiliary loss",
        "loop.py --auxiliary 1.0",
        "loop.py --auxiliary 1.0 --by-ranks",
        "loss_term",
    ),
    _of(
        "last window",
        "loop.py --accumulate 2 --short-window --dropout 0",
        "loop.py --accumulate 2 --short-window --dropout 0 --by-ranks",
        "gradient_factor",
    ),
    _of("sampler's seed", "loop.py", "loop.py --seed 3", "samples"),
    _of("no mixup", "images.py --mixup", "images.py", "inputs"),
    _of("normalised images", "images.py", "images.py --normalise", "sample_values"),
    _of("reduction in bf16", "loop.py", "loop.py --rounded", "reduction_type"),
    _of("scaled inputs", "images.py", "images.py --wider", "inputs"),
    _of("gradients kept", "loop.py --dropout 0", "loop.py --dropout 0 --no-zero", "gradient_kept"),
    _of("optimizer made anew", "loop.py", "loop.py --new-state", "state_lost"),
    _of("another activation", "loop.py", "loop.py --gelu", "outputs"),
    _of("momentum of batch norm", "images.py", "images.py --momentum", "buffers"),
)  # fmt: skip
