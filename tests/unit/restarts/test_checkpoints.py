"""Checkpoints of one rank: which are kept, which one counts, and what they bring back."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Never

import pytest
import torch
from torch.distributed.checkpoint import filesystem

from shardmark.core.errors import InputError
from shardmark.core.shares import Shard, StepShard
from shardmark.measure.step.recorder import Recorder
from shardmark.strategies.base import CheckpointState
from shardmark.train.checkpoint_files import CheckpointFiles, newest_common
from shardmark.train.checkpoints import Checkpoints
from shardmark.train.loop import Steps, train
from shardmark.train.record import RankReport
from tests.unit.training.test_loop import FakeWorker
from tests.unit.training.toy import CPU, CountingClock, ToyBatch, ToyWorkload


def files(folder: Path, *, rank: int = 0, leads: bool = True) -> CheckpointFiles:
    return CheckpointFiles(folder, rank, leads)


def kept(value: float) -> CheckpointState:
    own = {"shard": torch.full((3,), value), "nothing": torch.empty(0, 4)}
    return CheckpointState(
        own=own, shared={"whole": torch.tensor(value)}, counts={"scale": 0.5 + value}
    )


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
    one = files(tmp_path)
    sizes = [one.save(step, kept(step / 7), {"told": step}) for step in (10, 20, 30)]
    assert one.steps() == [20, 30]
    assert all(size > 1000 for size in sizes)
    found, state = one.load(30)
    assert state == {"told": 30}
    assert found.counts == {"scale": 0.5 + 30 / 7}
    assert torch.equal(found.own["shard"], torch.full((3,), 30 / 7))
    assert found.own["nothing"].shape == (0, 4)
    assert torch.equal(found.shared["whole"], torch.tensor(30 / 7))
    one.drop(lambda step: step > 20)
    assert one.steps() == [20]
    assert [path.name for path in one.shared.iterdir()] == ["step-20"]


def test_others_of_the_node_read_what_the_first_rank_wrote(tmp_path: Path) -> None:
    second = files(tmp_path, rank=1, leads=False)
    second.save(10, kept(1.0), {})
    assert second.steps() == [], "its part alone is no checkpoint"
    files(tmp_path).save(10, kept(2.0), {})
    assert second.steps() == [10]
    found, _ = second.load(10)
    assert torch.equal(found.own["shard"], torch.ones(3))
    assert torch.equal(found.shared["whole"], torch.tensor(2.0))


def test_a_disk_that_takes_nothing_is_told_by_its_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rank-0").touch()
    with pytest.raises(InputError, match=r"limits\.checkpoint_dir"):
        files(tmp_path).check()

    class Full(filesystem.FileSystemWriter):
        def write_data(self, *_: object, **__: object) -> Never:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(filesystem, "FileSystemWriter", Full)
    with pytest.raises(InputError, match="cannot be written: No space left on device"):
        files(tmp_path / "other").save(10, kept(1.0), {})


def test_half_a_checkpoint_is_none(tmp_path: Path) -> None:
    one = files(tmp_path)
    one.save(10, kept(1.0), {})
    (one.own / "step-20.part").mkdir()
    assert one.steps() == [10]
    one.save(20, kept(2.0), {})
    assert one.steps() == [10, 20]


def test_a_line_that_was_cut_short_is_left_out(tmp_path: Path) -> None:
    one = files(tmp_path)
    one.append(one.history, [{"loss": 1.5}, {"loss": float("nan")}])
    with one.history.open("a") as file:
        file.write('{"loss": 2')
    lines = one.lines(one.history)
    assert [line["loss"] == line["loss"] for line in lines] == [True, False]
    one.cut(one.history, lines[:1])
    assert one.history.read_text() == json.dumps({"loss": 1.5}) + "\n"


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
    one = checkpoints(Path())
    assert one.stops(0, 10) == [4, 8, 10]
    assert one.stops(0, 8) == [4, 8]
    assert one.stops(8, 20) == [12, 16, 20]
    assert one.stops(5, 7) == [7]
    assert [one.is_due(step, of=16) for step in (8, 10, 16)] == [True, False, False]


def lost(folder: Path, *, first: int, restart: int, now: float) -> list[float]:
    report = RankReport(folder, rank=0)
    checkpoints(folder, first=first, restart=restart, now=now).training_goes_on(report)
    return [one.lost_seconds for one in report.resumes]


def test_lost_seconds_count_from_when_training_last_stood_there(tmp_path: Path) -> None:
    assert lost(tmp_path, first=0, restart=0, now=110.0) == []
    # Died before the first checkpoint: all since the first step.
    assert lost(tmp_path, first=0, restart=1, now=130.0) == [20.0]
    files(tmp_path).append(files(tmp_path).places, [{"step": 4, "at_seconds": 140.0}])
    assert lost(tmp_path, first=4, restart=2, now=155.0) == [20.0, 15.0]
    # Again from the same one: what the restart before took does not count twice.
    assert lost(tmp_path, first=4, restart=3, now=162.0) == [20.0, 15.0, 7.0]


def test_a_rank_that_never_took_a_step_lost_all_since_its_launch(tmp_path: Path) -> None:
    assert lost(tmp_path, first=0, restart=1, now=130.0) == [30.0]


def rate(step: int) -> float:
    return 1.0 / (step + 1)


def trained(report: RankReport, batches: list[ToyBatch], end: int) -> None:
    """Steps with a window of their own."""
    assert report.recorder is not None
    assert report.steps is not None
    assert isinstance(report.worker, FakeWorker)
    train(
        report.worker,
        iter(batches),
        report.recorder,
        report.steps,
        end_step=end,
        step_shard_of=lambda index: StepShard(step=index, shard=Shard(index=0, count=1)),
        device=CPU,
    )


def fresh(folder: Path) -> RankReport:
    report = RankReport(folder, rank=0)
    report.recorder = Recorder(CountingClock())
    report.worker = FakeWorker()
    report.worker.group = Alone()
    report.workload = ToyWorkload()
    report.steps = Steps(
        warmup_steps=1, learning_rate=rate, seed_of=lambda _: 1, on_step=lambda _: None
    )
    return report


class Alone:
    """The only training rank."""

    def barrier(self) -> None: ...

    def gather(self, value: object) -> list[object]:
        return [value]


def test_the_report_goes_on_where_the_checkpoint_was(tmp_path: Path) -> None:
    """Two steps more than the checkpoint are taken, and again; each is there once."""
    before = fresh(tmp_path)
    assert before.recorder is not None
    assert isinstance(before.worker, FakeWorker)
    before.recorder.start_training()
    before.start_weights({"weight": torch.ones(2)})
    batches = [ToyWorkload().batch((2 * step, 2 * step + 1)) for step in range(6)]
    first = checkpoints(tmp_path)
    trained(before, batches, 4)
    before.end_epoch(4, None)
    first.save(4, before.worker, before)
    trained(before, batches[4:], 6)

    after = fresh(tmp_path)
    assert after.recorder is not None
    assert after.steps is not None
    assert isinstance(after.worker, FakeWorker)
    second = checkpoints(tmp_path, first=4, restart=1)
    second.restore_worker(after.worker, after, CPU)
    after.recorder.start_training()
    assert after.recorder.step == 4
    assert after.worker.rates == [rate(3)]
    assert after.epochs == [(0, 4, None)]
    assert after.initial_sha256 == before.initial_sha256
    assert after.recorder.windows == before.recorder.windows[:1]
    assert after.checkpoints == before.checkpoints
    assert [one.step for one in after.checkpoints] == [4]
    trained(after, batches[4:], 6)
    assert after.recorder.sample_ids == before.recorder.sample_ids
    assert after.steps.learning_rates == [rate(step) for step in range(6)]
    assert [float(x) for x in after.recorder.losses] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    told = [set(one.recorder.seconds_by_step("step")) for one in (before, after) if one.recorder]
    assert told == [set(range(6))] * 2
    assert before.recorder.taken(0)[:4] == after.recorder.taken(0)[:4]


def test_without_a_checkpoint_training_begins_anew(tmp_path: Path) -> None:
    report = fresh(tmp_path)
    assert isinstance(report.worker, FakeWorker)
    one = checkpoints(tmp_path, restart=1)
    one.files.append(one.files.history, [{"loss": 1.0}])
    one.restore_worker(report.worker, report, CPU)
    assert report.recorder is not None
    assert report.recorder.step == 0
    assert one.files.lines(one.files.history) == []
