"""`shardmark audit` on unchanged scripts under their own launcher."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

import shardmark.testing
from shardmark.audit.audit import AuditReport
from shardmark.audit.script import audit_script
from shardmark.base.errors import InputError
from shardmark.cli import main
from shardmark.scripts.command import parse_command
from tests.json_fields import problems_of
from tests.zoo.cases import CASES
from tests.zoo.forked import start_forked

(TOKEN_MEANS,) = (str(case.path) for case in CASES if case.script == "token_means")
TORCHRUN = ("torchrun", "--nproc-per-node", "2")


def test_a_deviation_is_named_in_the_first_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "--", *TORCHRUN, TOKEN_MEANS]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("2 ranks do not train what one process trains: the gradient is off")
    assert len(lines) <= 16


def test_a_right_script_exits_with_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "--format", "json", *TORCHRUN, TOKEN_MEANS, "--right"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert problems_of("Audit", printed) == []
    (audit,) = printed["audits"]
    assert audit["same"] is True
    assert all(check["holds"] for check in audit["checks"])
    assert audit["frameworks"] == ["DDP"]


@pytest.fixture
def _forked_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the ranks of a process that has imported torch, without their launcher."""
    forked = partial(audit_script, start=start_forked)
    monkeypatch.setattr("shardmark.audit.script.audit_script", forked)


@pytest.mark.usefixtures("_forked_ranks")
def test_an_assertion_holds_in_pytest() -> None:
    with pytest.raises(AssertionError, match="each rank averages over its own samples"):
        shardmark.testing.same_training(f"python {TOKEN_MEANS}")


@pytest.mark.usefixtures("_forked_ranks")
@pytest.mark.parametrize(
    ("script", "problem"),
    [
        ("print('no training')", "no rank takes an optimizer step"),
        ("raise ValueError('data is missing')", "data is missing"),
    ],
)
def test_a_script_that_does_not_train_is_refused(tmp_path: Path, script: str, problem: str) -> None:
    path = tmp_path / "train.py"
    path.write_text(f"import torch\n{script}")
    with pytest.raises(InputError, match=problem):
        shardmark.testing.same_training([*TORCHRUN, str(path)])


@pytest.mark.usefixtures("_forked_ranks")
@pytest.mark.parametrize(
    ("training", "reason"),
    [
        (
            "net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))\n"
            "optimizers = [torch.optim.SGD(part.parameters(), 0.1) for part in (net[0], net)]\n"
            "for optimizer in optimizers:\n"
            "    net(torch.ones(4, 2)).sum().backward()\n"
            "    optimizer.step()\n",
            "two optimizers",
        ),
        (
            "net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))\n"
            "optimizer = torch.optim.SGD(net.parameters(), 0.1)\n"
            "(net(torch.ones(4, 2)).sum() / 0.0).backward()\n"
            "optimizer.step()\n",
            "not finite",
        ),
        (
            "from torch.utils.data import DataLoader, DistributedSampler\n"
            "net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))\n"
            "optimizer = torch.optim.SGD(net.parameters(), 0.1)\n"
            "data = [(torch.ones(2) * n, torch.zeros(2)) for n in range(8)]\n"
            "for x, y in DataLoader(data, 2, sampler=DistributedSampler(data)):\n"
            "    torch.nn.functional.mse_loss(net(x), y).backward()\n"
            "    optimizer.step()\n"
            "    raise IndexError('k is out of range')\n",
            "k is out of range",
        ),
    ],
)
def test_a_training_that_cannot_be_audited_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], training: str, reason: str
) -> None:
    path = tmp_path / "train.py"
    path.write_text("import torch\ntorch.distributed.init_process_group('gloo')\n" + training)
    assert main(["audit", *TORCHRUN, str(path)]) == 2
    assert reason in capsys.readouterr().out


def audited(folder: Path, script: str, words: str) -> AuditReport:
    path = folder / "train.py"
    path.write_text(script)
    return audit_script(parse_command([str(path), *words.split()]), ranks=2)


OWN_RANKS = """
import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def train(rank, ranks, divided):
    meeting = "file://" + os.path.abspath("meeting")
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=ranks)
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = 16 if "short" in sys.argv else 64  # 2 steps of each rank, fewer than are asked for
    data = TensorDataset(torch.randn(rows, 8), torch.randn(rows, 2))
    for inputs, targets in DataLoader(data, 4, sampler=DistributedSampler(data)):
        optimizer.zero_grad()
        inputs += torch.randn_like(inputs) if "noise" in sys.argv else 0
        loss = nn.functional.mse_loss(model(inputs), targets)
        (loss / ranks if divided else loss).backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    ranks, divided = int(sys.argv[1]), "divided" in sys.argv
    if "noise" in sys.argv and ranks == 1:
        train(0, 1, divided)  # with other callers than a spawned rank
    elif "spawned" in sys.argv:
        mp.spawn(train, args=(ranks, divided), nprocs=ranks)
    else:
        processes = [mp.Process(target=train, args=(rank, ranks, divided)) for rank in range(ranks)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
"""


@pytest.mark.parametrize(
    ("start", "finding"),
    [
        ("spawned", ""),
        ("spawned short", ""),
        ("spawned noise", ""),
        ("forked divided", "averaged_twice"),
    ],
)
def test_a_script_that_starts_its_ranks_gets_their_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: str, finding: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(OWN_RANKS)
    report = audit_script(parse_command(f"python train.py {{ranks}} {start}"), ranks=2)
    assert report.same is not bool(finding), report.answer
    assert [found.name for found in report.findings] == [finding] * bool(finding)
    assert report.method.startswith("replay")


SEQUENCES = """
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence
from torch.utils.data import DataLoader, DistributedSampler


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.passes = 0
        self.rnn, self.head = nn.GRU(4, 8, batch_first=True), nn.Linear(8, 2)

    def forward(self, rows, lengths):
        _, last = self.rnn(pack_padded_sequence(rows, lengths, batch_first=True))
        if "drops" in sys.argv and self.passes >= ("late" in sys.argv):
            for _ in range(rows.shape[1]):  # as often as the longest sequence of the rank is long
                last = nn.functional.dropout(last, 0.1)
        self.passes += 1
        return self.head(last[0])


def together(samples):
    rows, targets = zip(*sorted(samples, key=lambda sample: -len(sample[0])))
    lengths = torch.tensor([len(sequence) for sequence in rows])
    return pad_sequence(rows, batch_first=True), lengths, torch.stack(targets)


dist.init_process_group("gloo")
torch.manual_seed(0)
data = [(torch.randn(2 + number * 5 % 23, 4), torch.randn(2)) for number in range(64)]
loader = DataLoader(data, 4, sampler=DistributedSampler(data), collate_fn=together)
model = nn.parallel.DistributedDataParallel(Reader())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for rows, lengths, targets in loader:
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(rows, lengths), targets)
    (loss / dist.get_world_size() if "divided" in sys.argv else loss).backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("words", "finding", "method"),
    [
        ("", [], "replay"),
        ("divided", ["averaged_twice"], "replay"),
        ("drops", [], "own gradients"),
        ("drops divided", ["averaged_twice"], "own gradients"),
        ("drops late", [], "replay"),
    ],
)
def test_sequences_that_each_rank_sorts_by_length(
    tmp_path: Path, words: str, finding: list[str], method: str
) -> None:
    report = audited(tmp_path, SEQUENCES, words)
    assert [found.name for found in report.findings] == finding, report.answer
    assert report.same is not bool(finding), report.answer
    assert report.method.startswith(method)
    assert ("trains, in 1 step; later ones are not compared" in report.answer) is (
        words == "drops late"
    )
    if method == "own gradients":
        assert "cannot repeat the random numbers of all ranks (train.py:" in report.notes[-1]


FEATURES = """
import sys

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Waves(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 32))
        phases = np.random.default_rng(0 if "seeded" in sys.argv else None).uniform(0, 6, 32)
        self.register_buffer("phases", torch.from_numpy(phases).float())

    def forward(self, inputs):
        return torch.cos(inputs @ self.weight + self.phases)


dist.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.randn(64, 8), torch.randn(64, 2))
model = nn.parallel.DistributedDataParallel(nn.Sequential(Waves(), nn.Linear(32, 2)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for inputs, targets in DataLoader(data, 4, sampler=DistributedSampler(data)):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(inputs), targets).backward()
    if "wrong" in sys.argv and dist.get_world_size() > 1:
        model.module[1].bias.grad *= 1.1
    optimizer.step()
"""


@pytest.mark.parametrize(("words", "same"), [("", None), ("seeded", True), ("seeded wrong", False)])
def test_a_model_with_results_of_its_own_in_each_start_is_not_blamed(
    tmp_path: Path, words: str, same: bool | None
) -> None:
    """DDP gives all ranks the buffers of rank 0, which one process draws anew."""
    report = audited(tmp_path, FEATURES, words)
    assert report.same is same, report.answer
    assert report.findings == ()
    assert ("module 0 has other results for the same inputs" in report.answer) is (same is None)


DRAWN = """
import sys

import torch
import torch.distributed as dist
from torch import nn

ROWS = 4
dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(1 + dist.get_rank())
returns = torch.zeros(ROWS, 2)
for _ in range(8):
    inputs = torch.randn(ROWS, 8)
    returns[:] = 0.9 * returns + inputs[:, :2]  # a buffer of one rank's size
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(inputs), returns)
    (loss / dist.get_world_size() if "divided" in sys.argv else loss).backward()
    optimizer.step()
"""


@pytest.mark.parametrize(("words", "finding"), [("", []), ("divided", ["averaged_twice"])])
def test_a_script_of_one_size_that_draws_its_samples(
    tmp_path: Path, words: str, finding: list[str]
) -> None:
    """The replay cannot take the samples of all ranks at once, and begins again without them."""
    report = audited(tmp_path, DRAWN, words)
    assert [found.name for found in report.findings] == finding, report.answer
    assert report.same is not bool(finding), report.answer
    assert report.method.startswith("own gradients")
