"""DeepSpeed's Adam for what is offloaded, on the host alone: its mathematics needs no GPU."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shardmark.base.evidence.captures import Capture
from shardmark.ranks.strategies.base import RankContext
from tests.distributed.captures import Case, capture_all, check_verdict, recipe, trial
from tests.distributed.ranks import run_ranks

COMPILE = "from deepspeed.ops.op_builder import CPUAdamBuilder; CPUAdamBuilder().load()"
EXTENSIONS = Path(os.environ.get("TORCH_EXTENSIONS_DIR", "~/.cache/torch_extensions")).expanduser()
if not [*EXTENSIONS.glob("**/cpu_adam.so")]:
    reason = f"takes minutes to compile, once for a machine: python -c '{COMPILE}'"
    pytest.skip(reason, allow_module_level=True)

CASES = {
    f"{name}, {optimizer}": Case(
        trial=trial(
            name,
            recipe(optimizer={"name": optimizer, "lr": 1e-3, "weight_decay": 0.1}),
            cpu_adam=True,
        )
    )
    for name, optimizer in (
        ("zero-1", "adam"),
        ("zero-1", "adamw"),
        ("zero-2", "adamw"),
        ("zero-3", "adamw"),
    )
}


def work(process: RankContext) -> dict[str, Capture | None]:
    return capture_all(process, CASES)


def test_deepspeed_s_adam_trains_as_torch_s(tmp_path: Path) -> None:
    """`check` would refuse it, as nothing is offloaded here: but the parameters are on the host."""
    captures = run_ranks(work, world_size=2, directory=tmp_path)
    for name, case in CASES.items():
        check_verdict(captures, name, case)
