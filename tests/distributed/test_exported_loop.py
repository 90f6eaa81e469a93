"""The loops that `export` writes train what the loop of one device trains."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from shardmark.bench.report.export.launch_configuration import launch_configuration
from tests.unit.bench.report.export.test_launch import planned

STRATEGIES = "[single, dp, ddp, zro, fsdp, {name: fsdp-hybrid, shard_group: 2}, fsdp1, zero-1]"
SCRIPT = """
import os
import runpy
import sys
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

import deepspeed.ops

warnings.simplefilter("ignore")
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiles for a minute
dist.init_process_group("gloo")
# One group for all loops: a second one would meet the first one's entries in the store.
dist.init_process_group = dist.destroy_process_group = lambda: None
torch.manual_seed(0)
# The ranks share out a batch of all samples, whose order is then no matter.
dataset = TensorDataset(torch.rand(8, 3), torch.arange(8) % 2)
states = {}
for name in sys.argv[1:]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    rank = f"-{os.environ['RANK']}" if name in ("single", "dp") else ""
    path = os.path.abspath(f"{name}{rank}.pt")
    runpy.run_path(f"{name}.py")["train"](model, dataset, "cpu", 2, 8, 0.5, path)
    if os.environ["RANK"] == "0":
        states[name] = torch.load(path)
for name, state in states.items():
    for key, value in states["single"].items():
        torch.testing.assert_close(state[key], value, msg=lambda text: f"{name}: {text}")
print(f"trained {len(states)}\\n", end="", flush=True)
os._exit(0)  # gloo's threads now and then abort an interpreter that ends
"""


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs deepspeed")
@pytest.mark.timeout(240)
def test_every_loop_trains_the_same_model(tmp_path: Path) -> None:
    names = []
    for name, trial in planned("recipe.precision=fp32", ranks=4, strategies=STRATEGIES).items():
        made = launch_configuration(trial.built_strategy, trial.recipe, trial.layout, "cpu")
        assert made is not None
        assert made.loop is not None
        (tmp_path / f"{name}.py").write_text(made.loop.code)
        if made.deepspeed is not None:
            batch = {"train_micro_batch_size_per_gpu": 2}
            (tmp_path / "deepspeed.json").write_text(json.dumps({**made.deepspeed, **batch}))
        names.append(name)
    (tmp_path / "train.py").write_text(SCRIPT)
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone")
    done = subprocess.run(
        [*torchrun, "--nproc-per-node", "4", "train.py", *names],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert f"trained {len(names)}\n" in done.stdout
