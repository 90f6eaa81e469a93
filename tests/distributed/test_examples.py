"""The scripts of `examples/`: the audit finds them right, and they train the same weights."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from shardmark.audit.script import audit_script
from shardmark.scripts.command import parse_command
from tests import ROOT
from tests.programs import output_of
from tests.zoo.forked import start_forked

EXAMPLES = ROOT / "examples"
AUDITED: list[Any] = ["ddp", "zro", "fsdp", "fsdp1"]
SEVERAL_RANKS = [*AUDITED, "fsdp_tp"]
if find_spec("deepspeed") is not None:
    SEVERAL_RANKS.append("zero")
    AUDITED.append(pytest.param("zero", marks=pytest.mark.zoo))  # compiles for a minute
SCRIPT = """
import os
import runpy
import sys
import warnings

import torch
import torch.distributed as dist

warnings.simplefilter("ignore")
try:
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiles for a minute
except ImportError:
    pass
dist.init_process_group("gloo")
# One group for all scripts: a second one would meet the first one's entries in the store.
dist.init_process_group = lambda *_, **__: None
dist.destroy_process_group = lambda: None
states = {}
for path in sys.argv[1:]:
    name = os.path.basename(path).removesuffix(".py")
    saved = os.path.abspath(f"{name}.pt")
    sys.argv[1:] = ["--epochs", "1", "--save", saved]
    runpy.run_path(path, run_name="__main__")
    if dist.get_rank() == 0:
        states[name] = torch.load(saved)
for name, state in states.items():
    for key, value in states["ddp"].items():
        torch.testing.assert_close(
            state[key], value, rtol=1e-4, atol=1e-5, msg=lambda text: f"{name}, {key}: {text}"
        )
print(f"trained {len(states)}\\n", end="", flush=True)
os._exit(0)  # gloo's threads now and then abort an interpreter that ends
"""


@pytest.mark.parametrize("name", AUDITED)
def test_an_example_trains_what_one_process_trains(name: str) -> None:
    command = parse_command([str(EXAMPLES / f"{name}.py")])
    report = audit_script(command, ranks=2, longest_seconds=240.0, start=start_forked)
    assert report.same is True, report.answer


def run(*command: str, cwd: Path) -> str:
    variables = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return output_of(sys.executable, *command, env=os.environ | variables, cwd=cwd)


def test_examples_with_several_ranks_save_the_same_weights(tmp_path: Path) -> None:
    """The audit has no answer for `fsdp_tp`: with tensor parallelism, no rank has a gradient."""
    (tmp_path / "train.py").write_text(SCRIPT)
    paths = [str(EXAMPLES / f"{name}.py") for name in SEVERAL_RANKS]
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    assert f"trained {len(paths)}\n" in run(*torchrun, "train.py", *paths, cwd=tmp_path)


def test_examples_in_one_process_train_the_same(tmp_path: Path) -> None:
    losses = {name: run(str(EXAMPLES / f"{name}.py"), cwd=tmp_path) for name in ("single", "dp")}
    first, *_, last = [float(line.split()[-1]) for line in losses["single"].splitlines()]
    assert last < first
    assert losses["dp"] == losses["single"]
