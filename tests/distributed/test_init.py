"""`shardmark init --from` runs the first step of a real script."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from shardmark.cli import main

if TYPE_CHECKING:
    import pytest

SCRIPT = """
import argparse
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.1)
rate = parser.parse_args().lr
Path("checkpoint").write_text("trained")
torch.manual_seed(7)
model = nn.Linear(4, 1)
data = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
loader = DataLoader(data, batch_size=8, shuffle=True)
groups = [{"params": [model.weight]}, {"params": [model.bias], "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=rate, weight_decay=0.1)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)
for number, (inputs, targets) in enumerate(loader, 1):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs = model(inputs)
    (nn.functional.mse_loss(outputs.float(), targets) / 2).backward()
    if number % 2 == 0:
        nn.utils.clip_grad_norm_(model.parameters(), 1.5)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
"""


def test_the_first_step_of_a_script_shows_its_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT)
    assert main(["init", "--from", "train.py --lr 0.25", "--out", "new"]) == 0
    printed = capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "train.py"]
    assert "your files are unchanged; the script wrote checkpoint" in printed
    for found in (
        "global_batch: 32 (DataLoader of 64 samples with batches of 8 x 2 micro-batches x 2 ranks",
        "gradient_accumulation: 2",
        "optimizer: {name: adamw, lr: 0.25, eps: 1.0e-08, weight_decay: 0.1, betas: [0.9, 0.999]}",
        "precision: bf16",
        "seed: 7",
        "gradient_clipping: 1.5",
    ):
        assert f"found      {found}" in printed
    assert "not found  schedule: LambdaLR" in printed
    assert "left out   settings of parameter group 2 (weight_decay 0)" in printed


def test_a_script_that_fails_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("import torch\nraise ValueError('data is missing')")
    assert main(["init", "--from", "train.py", "--out", "new"]) == 2
    error = capsys.readouterr().err
    assert "data is missing" in error
    assert "Traceback" not in error
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]
