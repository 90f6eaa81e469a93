"""Runs a script of this folder without Shardmark on two processes, on one, and in one pass.

    python benchmarks/trainers/confirm.py transformers_seq2seq.py --habit accumulation

The learning rate is 0, so that all steps have the same weights, and one process gets the rows of
both in micro-batches of twice the size.  In one pass it gets all rows of a step at once, without
accumulation.  Public hooks of torch read the gradients after each step of an optimizer, which
Lightning computes inside of the step, and the first words of the rows that embeddings get.  Scripts
that clip run without it, too, which shows the gradients before the clip.  The exit code is 1 if a
gradient of two processes differs from one of the others by more than 0.01 %, and 2 if the first
step has other rows: then nothing is compared.  The steps before other rows count.
"""

import os
import runpy
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

STEPS = 8
HERE = Path(__file__).parent


def note_gradients(file: str) -> None:
    """Store the gradients, norms and rows of the first steps, and end the process."""
    gradients, norms, rows, seen = [], [], [], set()

    def note_rows(module, inputs):
        if isinstance(module, nn.Embedding) and module.num_embeddings == 100:  # WORDS of parts.py
            seen.update(tuple(word for word in row if word > 2)[:3] for row in inputs[0].tolist())

    def note(optimizer, *_):
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        grads = [p.grad for p in parameters if p.grad is not None]
        full = [g.full_tensor() if hasattr(g, "full_tensor") else g for g in grads]
        gradients.append(torch.cat([g.flatten().double() for g in full] or [torch.zeros(0)]))
        square = gradients[-1].square().sum()
        if "zero" in " ".join(sys.argv):  # each rank has a part of the gradient
            dist.all_reduce(square)
        norms.append(square.sqrt().item())
        of_ranks = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, seen)
        rows.append(set().union(*of_ranks))
        seen.clear()
        if dist.get_rank() == 0:  # a script may take fewer steps
            torch.save((gradients, norms, rows), file)
        if len(norms) == STEPS:
            os._exit(0)

    register_module_forward_pre_hook(note_rows)
    register_optimizer_step_post_hook(note)


def start_ranks(ranks: int, words: list[str], variables: dict[str, str]) -> None:
    """Start the words on a number of ranks by torchrun, and wait."""
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [sys.executable, *start, *words]
    subprocess.run(command, env=os.environ | variables, stdout=sys.stderr, check=True)


def compare(words: list[str], place: str, lines: list[str], start) -> bool:
    """Add a line for each step; True if its gradients differ, None if the first has other rows."""

    def gradients_of(ranks: int, *options: str):
        with TemporaryDirectory() as folder:
            file = str(Path(folder) / "gradients.pt")
            fixed = ["--learning-rate", "0", "--same-order"]
            start(ranks, [__file__, *words, *fixed, *options], {"GRADIENTS": file})
            return torch.load(file)

    two = gradients_of(2)
    others = {"one process": gradients_of(1, "--micro-batch", "4")}
    if {"accumulation", "epoch"} & {*" ".join(words).replace(",", " ").split()}:
        others["one pass"] = gradients_of(1, "--micro-batch", "16", "--accumulation", "1")
    differs = False
    steps = min(len(norms) for _, norms, _ in (two, *others.values()))
    for step, norm in enumerate(two[1][:steps]):
        line = f"step {step + 1}: gradient norm{place} {norm:.6g} of two processes"
        for name, (gradients, norms, rows) in others.items():
            if rows[step] != two[2][step]:
                lines.append(f"step {step + 1}: {name} has other rows than two processes")
                return None if step == 0 else differs
            off = abs(norm / norms[step] - 1) if norms[step] else float(norm > 0)
            if gradients[step].shape == two[0][step].shape and norms[step]:
                off = ((two[0][step] - gradients[step]).norm() / norms[step]).item()
            differs |= off > 1e-4  # rounding is below 1e-5
            line += f"; {norms[step]:.6g} of {name}, off by {100 * off:.2g} %"
        lines.append(line)
    return differs


def confirm(words: list[str], start=start_ranks):
    """Whether gradients differ, None where the first step has other rows, and lines about them."""
    lines: list[str] = []
    unclipped = ["plain" if word == "clip" else word for word in words]
    differs = compare(unclipped, " before the clip" if "clip" in words else "", lines, start)
    if "clip" in words and differs is not None:
        clipped = compare(words, " after the clip", lines, start)
        differs = None if clipped is None else differs or clipped
    return differs, lines


def main() -> None:
    differs, lines = confirm(sys.argv[1:])
    print(*lines, sep="\n")
    raise SystemExit(2 if differs is None else int(differs))


if "GRADIENTS" in os.environ:
    script = str(HERE / sys.argv[1])
    sys.argv = sys.argv[1:]
    note_gradients(os.environ["GRADIENTS"])
    runpy.run_path(script, run_name="__main__")
elif __name__ == "__main__":
    main()
