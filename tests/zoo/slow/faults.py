"""Faults that make a training script slow, chosen by `--fault KIND --way WAY --amount-ms X`."""

# mypy: disable-error-code="no-untyped-call,no-untyped-def,override,no-any-return,unused-ignore"

from __future__ import annotations

import argparse
import atexit
import os
import subprocess
import sys
import time

import torch
from torch import Tensor, nn

RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
SHORT, LONG = 32, 128  # lengths of rows in tokens
SPIN = "import os, sys\nwhile os.getppid() == int(sys.argv[1]): pass"
chosen = argparse.Namespace()


def arguments(**defaults: float | str) -> argparse.Namespace:
    """Arguments of a script, with those of the faults; pins the rank for `slow_core`."""
    parser = argparse.ArgumentParser()
    for name, value in defaults.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    for name in ("fault", "way"):
        parser.add_argument(f"--{name}", default="")
    parser.add_argument("--amount-ms", type=float, default=0.0)
    parser.add_argument("--on-rank", type=int)
    parser.parse_args(namespace=chosen)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if chosen.fault == "slow_core":
        take_core(spinners=int(chosen.way))
    return chosen


def has(kind: str, way: str = "") -> bool:
    """The fault was chosen, in this way if one is given, and for this rank."""
    here = chosen.on_rank is None or chosen.on_rank == RANK
    return here and chosen.fault == kind and way in {"", chosen.way}


def slow_input(way: str) -> None:
    if has("slow_input", way):
        time.sleep(chosen.amount_ms / 1e3)


class Delayed(torch.autograd.Function):
    """The identity, whose backward pass computes for the amount."""

    @staticmethod
    def forward(ctx, values: Tensor) -> Tensor:
        return values.view_as(values)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        end, values = time.perf_counter() + chosen.amount_ms / 1e3, torch.ones(64, 64)
        while time.perf_counter() < end:
            values = torch.tanh(values @ values)
        return gradient


def slow_backward(values: Tensor) -> Tensor:
    if not values.requires_grad:
        return values
    if has("slow_backward", "hook"):
        values.register_hook(lambda _: time.sleep(chosen.amount_ms / 1e3))
    return Delayed.apply(values) if has("slow_backward", "function") else values


def take_core(*, spinners: int) -> None:
    """Pin the chosen rank to the last core, which children that end with it share by spinning."""
    cores, local = sorted(os.sched_getaffinity(0)), int(os.environ.get("LOCAL_RANK", "0"))
    if local != chosen.on_rank:
        os.sched_setaffinity(0, {cores[local % (len(cores) - 1)]})
        return
    os.sched_setaffinity(0, {cores[-1]})
    for _ in range(spinners):
        child = subprocess.Popen([sys.executable, "-S", "-c", SPIN, str(os.getpid())])
        atexit.register(child.wait)
        atexit.register(child.kill)


def row_length(step: int, rank: int) -> int:
    """Length of the rows: long on one rank, or in half of the steps, at other times or together."""
    long = {"rank": rank == chosen.on_rank, "vary": step >> rank & 1, "together": step & 1}
    return LONG if chosen.fault == "unlike_rows" and long[chosen.way] else SHORT


@torch.no_grad()
def host_work(model: nn.Module, predicted: Tensor, targets: Tensor) -> None:
    """Python's work in a training loop: limits of norms, sums of gradients, likeness of texts."""
    for p in model.parameters() if has("host_bound") else ():
        local = p.to_local() if hasattr(p, "to_local") else p
        if chosen.way == "rows" and p.dim() > 1:
            for row in local:
                norm = row.norm()
                if norm > 5:
                    row.mul_(5 / norm)
        elif chosen.way == "item":
            sum(abs(value.item()) for value in local.flatten()[:1500])
    if has("host_bound", "metric"):
        edits(predicted.flatten().tolist(), targets.flatten().tolist())


def edits(a: list[int], b: list[int]) -> int:
    above = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        line = [i]
        for j, y in enumerate(b, 1):
            line.append(min(line[-1] + 1, above[j] + 1, above[j - 1] + (x != y)))
        above = line
    return above[-1]
