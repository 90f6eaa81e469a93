"""Files of `shardmark export`, under the launchers that they are for."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from shardmark.cli import main
from tests.programs import output_of
from tests.unit.bench.report.export.test_launch import planned, stored

OVERRIDES = ("recipe.gradient_accumulation=2", "recipe.seed=7")
TORCHRUN = """
import json
import os
import runpy
import sys
import warnings
from argparse import ArgumentParser

import torch
import torch.distributed as dist
from torch import nn

warnings.simplefilter("error", FutureWarning)  # arguments that the next torch will not take


class Block(nn.Sequential):
    pass


def steps(model, train, settings):
    batch = torch.rand(settings["micro_batch"], 3)
    for _ in range(settings["gradient_accumulation"]):
        train(model(batch).square().mean() / settings["gradient_accumulation"])


def settings_of(strategy):
    return json.load(open(f"{strategy}/settings.json"))


torch.manual_seed(settings_of("ddp")["seed"])
dist.init_process_group("gloo")
ranks = dist.get_world_size()

ddp = settings_of("ddp")
assert ddp["micro_batch"] * ranks * ddp["gradient_accumulation"] == ddp["global_batch"]
sys.path.insert(0, "fsdp")
gradients = []
for strategy in ("ddp", "fsdp"):
    torch.manual_seed(0)
    layers = nn.Linear(3, 4), Block(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 2)
    model = runpy.run_path(f"{strategy}/wrap.py")["wrap"](nn.Sequential(*layers))
    torch.manual_seed(dist.get_rank())
    steps(model, lambda loss: loss.backward(), settings_of(strategy))
    found = [parameter.grad for parameter in layers[1].parameters()]
    gradients.append([getattr(grad, "full_tensor", lambda grad=grad: grad)() for grad in found])
assert type(layers[1]).__name__ == "FSDPBlock", "blocks are units of their own"
torch.testing.assert_close(*gradients)

import deepspeed.ops

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiles for a minute
warnings.simplefilter("ignore")
model = nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=settings_of("zero-3")["optimizer"]["lr"])
parsed = deepspeed.add_config_arguments(ArgumentParser()).parse_args()
engine, *_ = deepspeed.initialize(args=parsed, model=model, optimizer=optimizer)
before = engine.global_steps


def train(loss):
    engine.backward(loss)
    engine.step()


steps(engine, train, settings_of("zero-3"))
told = [ranks, torch.get_num_threads(), engine.zero_optimization_stage(), engine.global_steps]
told.append(os.environ["NCCL_ALGO"])
print(f"trained {' '.join(map(str, told))}\\n", end="", flush=True)  # one write: ranks share it
dist.destroy_process_group()
os._exit(0)  # gloo's threads now and then abort an interpreter that ends
"""
ACCELERATE = """
import json
import os
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs

settings = json.load(open("ddp/settings.json"))
arguments = DistributedDataParallelKwargs(**settings["arguments"])
accelerator = Accelerator(kwargs_handlers=[arguments])
model = accelerator.prepare(torch.nn.Linear(3, 2))
accelerator.backward(model(torch.rand(settings["micro_batch"], 3)).square().mean())
print(f"trained {accelerator.num_processes} {type(model).__name__}\\n", end="", flush=True)
accelerator.end_training()
os._exit(0)  # gloo's threads now and then abort an interpreter that ends
"""


def needs(library: str) -> pytest.MarkDecorator:
    """Asked without importing it: that takes seconds."""
    return pytest.mark.skipif(find_spec(library) is None, reason=f"needs {library}")


def exported(folder: Path, **launchers: str) -> None:
    """`FOLDER/STRATEGY/launch.sh` and its settings, of trials on two ranks."""
    trials = planned(*OVERRIDES, device="cpu", ranks=2)
    run = stored(folder / "run", trials)
    for strategy, to in launchers.items():
        name = strategy.replace("_", "-")
        arguments = ["--to", to, "--trial", trials[name].id, "--out", str(folder / name)]
        assert main(["export", run, *arguments]) == 0


def launched(folder: Path, strategy: str, script: str) -> list[str]:
    """The last line of each rank."""
    (folder / "train.py").write_text(script)
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    words = ("sh", f"{strategy}/launch.sh", "train.py")
    printed = output_of(*words, env=os.environ | {"PATH": path}, cwd=folder)
    return [line for line in printed.splitlines() if line.startswith("trained")]


@needs("deepspeed")
def test_exported_files_train_under_torchrun_and_deepspeed(tmp_path: Path) -> None:
    exported(tmp_path, ddp="torchrun", fsdp="torchrun", zero_3="deepspeed")
    told = "trained 2 2 3 1 Ring; touch hacked"  # ranks, threads, stage, steps, a variable
    assert launched(tmp_path, "zero-3", TORCHRUN) == [told] * 2
    assert not (tmp_path / "hacked").exists()


@needs("accelerate")
def test_exported_files_train_under_accelerate(tmp_path: Path) -> None:
    exported(tmp_path, ddp="accelerate")
    expected = "trained 2 DistributedDataParallel"
    assert launched(tmp_path, "ddp", ACCELERATE) == [expected] * 2
