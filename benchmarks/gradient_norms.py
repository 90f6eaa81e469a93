"""Prints the norm of the gradients that each optimizer step gets, without Shardmark.

Run:  torchrun --nproc-per-node 2 benchmarks/gradient_norms.py SCRIPT [OPTION ...]
"""

from __future__ import annotations

import os
import runpy
import sys
from typing import Any

from torch.optim.optimizer import register_optimizer_step_pre_hook


def show(optimizer: Any, _arguments: Any, _options: Any) -> None:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    squares = [float(p.grad.double().pow(2).sum()) for p in parameters if p.grad is not None]
    # One write, as the ranks share the output.
    sys.stdout.write(f"norm of rank {os.environ['RANK']}: {sum(squares) ** 0.5:.6g}\n")
    sys.stdout.flush()


register_optimizer_step_pre_hook(show)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
