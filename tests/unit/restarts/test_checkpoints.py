"""Checkpoints of one rank: which are kept, which one counts, and what they bring back."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Never

import pytest
import torch

from shardmark.core.errors import InputError
from shardmark.core.shares import Shard, StepShard
from shardmark.measure.step.recorder import Recorder
from shardmark.strategies.base import CheckpointState, TrainingGroup
from shardmark.train.checkpoint import CheckpointFiles, Checkpoints, newest_common
from shardmark.train.loop import LoopOptions, train
from shardmark.train.record import RankReport, weights_sha256
from tests.unit.training.toy import CPU, CountingClock, FakeWorker, ToyBatch, ToyWorkload


def files(folder: Path, *, rank: int = 0, leads: bool = True) -> CheckpointFiles:
    return CheckpointFiles(folder, rank, leads)


def state_of(value: float) -> CheckpointState:
    own = {"shard": torch.full((3,), value), "nothing": torch.empty(0, 4)}
    shared = {"whole": torch.tensor(value)}
    return CheckpointState(own=own, shared=shared, counts={"scale": 0.5 + value})


@pytest.mark.parametrize(
    ("offers", "step"),
    [
        ([[10, 20], [10, 20]], 20),
        ([[10, 20], [10]], 10),
        ([[10, 20], [20, 30], [20]], 20),
        ([[10], []], 0),
        ([[10, 20], None, [10, 20]], 20),
        ([None], 0),
        ([[10], [20]], 0),
    ],
)
def test_only_what_every_rank_has_counts(offers: list[list[int] | None], step: int) -> None:
    assert newest_common(offers) == step


def test_the_last_two_are_kept_and_come_back_as_they_were(tmp_path: Path) -> None:
    rank = files(tmp_path)
    sizes = [rank.save(step, state_of(step / 7), {"told": step}) for step in (10, 20, 30)]
    assert rank.steps() == [20, 30]
    assert all(size > 1000 for size in sizes)
    state, progress = rank.load(30)
    assert progress == {"told": 30}
    assert state.counts == {"scale": 0.5 + 30 / 7}
    assert torch.equal(state.own["shard"], torch.full((3,), 30 / 7))
    assert state.own["nothing"].shape == (0, 4)
    assert torch.equal(state.shared["whole"], torch.tensor(30 / 7))
    other = files(tmp_path, rank=1, leads=False)
    assert other.steps() == []
    other.save(30, state_of(1.0), {})
    assert torch.equal(other.load(30)[0].own["shard"], torch.ones(3))
    assert torch.equal(other.load(30)[0].shared["whole"], torch.tensor(30 / 7)), "of the first rank"
    rank.drop(lambda step: step > 20)
    assert rank.steps() == [20]
    assert [path.name for path in rank.shared.iterdir()] == ["step-20"]


def test_a_view_is_saved_without_the_rest_of_its_storage(tmp_path: Path) -> None:
    flat = torch.arange(2.0**20)
    rank = files(tmp_path)
    assert rank.save(10, CheckpointState(own={"part": flat[8:16]}), {}) < 10_000
    assert torch.equal(rank.load(10)[0].own["part"], flat[8:16])


def test_a_disk_that_takes_nothing_is_told_by_its_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> Never:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(InputError, match=r"limits\.checkpoint_dir.*No space left on device"):
        files(tmp_path).save(10, state_of(1.0), {})
    (tmp_path / "rank-1").touch()
    with pytest.raises(InputError, match=r"limits\.checkpoint_dir"):
        files(tmp_path, rank=1).append(tmp_path / "rank-1" / "history.jsonl", [{}])


def test_half_a_checkpoint_is_none(tmp_path: Path) -> None:
    rank = files(tmp_path)
    rank.save(10, state_of(1.0), {})
    (rank.own / "step-20.part").write_bytes(b"half")
    assert rank.steps() == [10]
    rank.save(20, state_of(2.0), {})
    assert rank.steps() == [10, 20]
    assert not list(rank.own.glob("*.part"))


def test_a_line_that_was_cut_short_is_left_out(tmp_path: Path) -> None:
    rank = files(tmp_path)
    rank.append(rank.history, [{"loss": 1.5}, {"loss": float("nan")}])
    with rank.history.open("a") as file:
        file.write('{"loss": 2')
    lines = rank.lines(rank.history)
    assert [line["loss"] == line["loss"] for line in lines] == [True, False]
    rank.cut(rank.history, lines[:1])
    assert rank.history.read_text() == json.dumps({"loss": 1.5}) + "\n"


def checkpoints(folder: Path, *, first: int = 0, restart: int = 0, now: float = 0.0) -> Checkpoints:
    return Checkpoints(
        files=files(folder),
        every_steps=4,
        first_step=first,
        restart=restart,
        launched_at_seconds=100.0,
        clock=lambda: now,
    )


def test_training_pauses_for_checkpoints_inside_an_epoch_and_not_at_the_very_end() -> None:
    due = checkpoints(Path())
    spans = {(0, 10): [4, 8, 10], (0, 8): [4, 8], (8, 20): [12, 16, 20], (5, 7): [7]}
    assert {span: due.stops(*span) for span in spans} == spans
    assert [due.is_due(step, of=16) for step in (8, 10, 16)] == [True, False, False]


def lost(folder: Path, *, first: int, restart: int, now: float) -> list[float]:
    report = RankReport(folder, rank=0)
    checkpoints(folder, first=first, restart=restart, now=now).training_goes_on(report)
    return [resume.lost_seconds for resume in report.resumes]


def test_lost_seconds_count_from_when_training_last_stood_there(tmp_path: Path) -> None:
    never = tmp_path / "never"
    assert lost(never, first=0, restart=1, now=130.0) == [30.0], "no step since its launch"
    assert lost(tmp_path, first=0, restart=0, now=110.0) == []
    # Died before the first checkpoint: all since the first step.
    assert lost(tmp_path, first=0, restart=1, now=130.0) == [20.0]
    files(tmp_path).append(files(tmp_path).starts, [{"step": 4, "at_seconds": 140.0}])
    assert lost(tmp_path, first=4, restart=2, now=155.0) == [20.0, 15.0]
    # Again from the same one: what the restart before took does not count twice.
    assert lost(tmp_path, first=4, restart=3, now=162.0) == [20.0, 15.0, 7.0]


def rate(step: int) -> float:
    return 1.0 / (step + 1)


class Alone(TrainingGroup):
    """The only training rank."""

    def barrier(self) -> None: ...

    def gather(self, value: object) -> list[object]:
        return [value]


class Rank:
    """One process that has been this rank."""

    def __init__(self, folder: Path) -> None:
        self.recorder = Recorder(CountingClock())
        self.worker = FakeWorker()
        self.worker.group = Alone()
        self.report = RankReport(folder, rank=0)
        self.report.recorder, self.report.worker = self.recorder, self.worker
        self.report.workload = ToyWorkload()

    def train(self, batches: list[ToyBatch]) -> None:
        """Steps with a window of their own."""
        options = LoopOptions(devices=(CPU,), seed=1, learning_rate=rate, on_step=lambda _: None)
        shard = Shard(index=0, count=1)
        steps = (StepShard(step=step, shard=shard) for step in range(self.recorder.step, 6))
        pairs = zip(steps, batches, strict=False)
        train(self.worker, pairs, self.recorder, options, measured=True)


def test_the_report_goes_on_where_the_checkpoint_was(tmp_path: Path) -> None:
    """Two steps more than the checkpoint are taken, and again; each is there once."""
    before = Rank(tmp_path)
    before.recorder.start_training()
    before.report.initial_sha256 = weights_sha256([("weight", torch.ones(2))])
    batches = [ToyWorkload().batch((2 * step, 2 * step + 1)) for step in range(6)]
    before.train(batches[:4])
    before.report.end_epoch(4, None)
    checkpoints(tmp_path).save(4, before.worker, before.report)
    before.train(batches[4:])

    after = Rank(tmp_path)
    second = checkpoints(tmp_path, first=4, restart=1)
    second.restore_worker(after.worker, after.report)
    after.recorder.start_training()
    assert after.recorder.step == 4
    assert after.worker.rates == [rate(3)]
    assert after.report.epochs == [(0, 4, None)]
    assert after.report.initial_sha256 == before.report.initial_sha256
    assert after.recorder.windows == before.recorder.windows[:1]
    assert after.report.checkpoints == before.report.checkpoints
    assert [checkpoint.step for checkpoint in after.report.checkpoints] == [4]
    after.train(batches[4:])
    taken = after.recorder.steps_since()
    assert taken[:4] == before.recorder.steps_since()[:4]
    assert [step.sample_ids for step in taken] == [batch.sample_ids for batch in batches]
    assert [step.learning_rate for step in taken] == [rate(step) for step in range(6)]
    assert [step.loss for step in taken] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]


def test_without_a_checkpoint_training_begins_anew(tmp_path: Path) -> None:
    rank, restarted = Rank(tmp_path), checkpoints(tmp_path, restart=1)
    restarted.files.append(restarted.files.history, [{"loss": 1.0}])
    restarted.restore_worker(rank.worker, rank.report)
    assert rank.recorder.step == 0
    assert restarted.files.lines(restarted.files.history) == []
