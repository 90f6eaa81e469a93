"""Runs a script of this folder without Shardmark on two processes, on one, and in one pass.

    python benchmarks/trainers/confirm.py transformers_seq2seq.py --habit accumulation

The learning rate is 0, so that all steps have the same weights, and one process gets the rows of
both in micro-batches of twice the size.  In one pass it gets all rows of a step at once, without
accumulation.  A public hook of torch reads the gradients before each step of an optimizer.  The
exit code is 1 if a gradient of two processes differs from one of the others by more than 0.1 %.
"""

import os
import runpy
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook

STEPS = 8
HERE = Path(__file__).parent


def note_gradients(file: str) -> None:
    """Store the gradients and norms of the first steps, and end the process."""
    gradients, norms = [], []

    def note(optimizer, *_):
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        parts = [p.grad.flatten().double() for p in parameters if p.grad is not None]
        gradients.append(torch.cat(parts) if parts else torch.zeros(0))
        square = gradients[-1].square().sum()
        if "zero" in " ".join(sys.argv):  # each rank has a part of the gradient
            dist.all_reduce(square)
        norms.append(square.sqrt().item())
        if len(norms) == STEPS:
            if dist.get_rank() == 0:
                torch.save((gradients, norms), file)
            os._exit(0)

    register_optimizer_step_pre_hook(note)


def gradients_of(ranks: int, *options: str):
    with TemporaryDirectory() as folder:
        file = Path(folder) / "gradients.pt"
        start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        words = [__file__, *sys.argv[1:], "--learning-rate", "0", *options]
        environment = {**os.environ, "GRADIENTS": str(file)}
        command = [sys.executable, *start, *words]
        subprocess.run(command, env=environment, stdout=sys.stderr, check=True)
        return torch.load(file)


def main() -> None:
    two = gradients_of(2)
    others = {"one process": gradients_of(1, "--micro-batch", "4")}
    if {"accumulation", "epoch"} & {*" ".join(sys.argv).replace(",", " ").split()}:
        others["one pass"] = gradients_of(1, "--micro-batch", "16", "--accumulation", "1")
    differs = False
    for step, norm in enumerate(two[1]):
        line = f"step {step + 1}: gradient norm {norm:.6g} of two processes"
        for name, (gradients, norms) in others.items():
            off = abs(norm / norms[step] - 1) if norms[step] else float(norm > 0)
            if gradients[step].shape == two[0][step].shape and norms[step]:
                off = ((two[0][step] - gradients[step]).norm() / norms[step]).item()
            differs |= off > 1e-3
            line += f"; {norms[step]:.6g} of {name}, off by {100 * off:.2g} %"
        print(line)
    raise SystemExit(int(differs))


if "GRADIENTS" in os.environ:
    script = str(HERE / sys.argv[1])
    sys.argv = sys.argv[1:]
    note_gradients(os.environ["GRADIENTS"])
    runpy.run_path(script, run_name="__main__")
elif __name__ == "__main__":
    main()
