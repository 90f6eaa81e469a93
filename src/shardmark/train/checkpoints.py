"""Keeps a trial's checkpoints on one rank, and has it go on from the last one after a restart."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardmark.core.environment_variables import LAUNCHED_VARIABLE, RESTART_VARIABLE
from shardmark.measure.step.recorder import TakenStep, Window
from shardmark.results.schema import CheckpointRecord, ResumeRecord
from shardmark.strategies.base import RankContext, Server, Worker
from shardmark.train.checkpoint_files import ABSENT_FILE, CheckpointFiles, newest_common
from shardmark.train.checkpoint_folder import folder_of_rank
from shardmark.train.record import Evaluation, RankReport
from shardmark.trials.trial import Trial


@dataclass(slots=True, kw_only=True)
class Checkpoints:
    """One rank's, of a trial that may be restarted."""

    files: CheckpointFiles
    every_steps: int
    first_step: int
    """Steps that the training has taken already."""
    restart: int
    launched_at_seconds: float
    clock: Callable[[], float] = time.time
    kept_steps: int = field(default=0, init=False)
    """How many of this rank's own steps are in its history."""

    @classmethod
    def joined(cls, trial: Trial, directory: Path, process: RankContext) -> Checkpoints | None:
        """Agree with all ranks, servers too, on where to begin; None without restarts.

        Collective.
        """
        if not trial.limits.max_restarts:
            return None
        files = CheckpointFiles(
            folder_of_rank(directory), process.rank, leads=process.local_rank == 0
        )
        files.check()
        absent = files.own / ABSENT_FILE
        offer = None if absent.exists() else files.steps()
        offers: list[Any] = [None] * process.world_size
        dist.all_gather_object(offers, offer)
        absent.unlink(missing_ok=True)
        return cls(
            files=files,
            every_steps=trial.limits.checkpoint_steps,
            first_step=newest_common(offers),
            restart=int(os.environ.get(RESTART_VARIABLE, "0")),
            launched_at_seconds=float(os.environ.get(LAUNCHED_VARIABLE, "0")) or time.time(),
        )

    def stops(self, first: int, end: int) -> list[int]:
        """Steps at which training pauses on its way from `first` to `end`, which is the last."""
        after = (first // self.every_steps + 1) * self.every_steps
        return [*range(after, end, self.every_steps), end]

    def is_due(self, step: int, *, of: int) -> bool:
        """Whether to write one after an epoch: not when the training is over."""
        return step % self.every_steps == 0 and step < of

    def restore_server(self, server: Server, report: RankReport) -> None:
        """Have it go on from the checkpoint, if there is one."""
        if self.first_step:
            self._forget_later()
            kept, _ = self.files.load(self.first_step)
            server.load_checkpoint_state(kept)
            report.checkpoints = self._written_before()

    def restore_worker(self, worker: Worker, report: RankReport, device: torch.device) -> None:
        """Have it and its report go on from the checkpoint, if there is one."""
        step = max((s for s in self.files.steps() if s <= self.first_step), default=0)
        self._forget_later()
        if not step:
            self.files.cut(self.files.history, ()) if self.restart else None
            return
        kept, state = self.files.load(step)
        worker.load_checkpoint_state(kept)
        lines = self.files.lines(self.files.history)[: state["own_steps"]]
        self.files.cut(self.files.history, lines)
        self.kept_steps = len(lines)
        _restore(report, lines, state, device)
        report.checkpoints = self._written_before()
        if report.steps is not None and report.steps.learning_rates:
            worker.set_learning_rate(report.steps.learning_rates[-1])

    def _forget_later(self) -> None:
        """A checkpoint that some rank lacks is of no use."""
        self.files.drop(lambda step: step > self.first_step)

    def training_goes_on(self, report: RankReport) -> None:
        """The first step comes next: what was lost since training had last stood here ends now."""
        now = self.clock()
        places = self.files.lines(self.files.places)
        earlier = [ResumeRecord(**place) for place in places if "lost_seconds" in place]
        if self.restart:
            stood = [one["at_seconds"] for one in places if one["step"] == self.first_step]
            since = max(stood, default=self.launched_at_seconds)
            earlier.append(
                ResumeRecord(
                    restart=self.restart,
                    step=self.first_step,
                    at_seconds=now,
                    lost_seconds=max(0.0, now - since),
                )
            )
            self.files.append(self.files.places, [earlier[-1].model_dump()])
        else:
            self._stand_at(self.first_step)
        report.resumes = earlier

    def _stand_at(self, step: int, written: CheckpointRecord | None = None) -> None:
        place: dict[str, Any] = {"step": step, "at_seconds": self.clock()}
        if written is not None:
            place["checkpoint"] = written.model_dump()
        self.files.append(self.files.places, [place])

    def _written_before(self) -> list[CheckpointRecord]:
        """The checkpoints up to the one that is gone on from."""
        found = [place.get("checkpoint") for place in self.files.lines(self.files.places)]
        last = {one["step"]: CheckpointRecord(**one) for one in found if one is not None}
        return [last[step] for step in sorted(last) if step <= self.first_step]

    def save(self, step: int, worker: Worker, report: RankReport) -> None:
        """Write the checkpoint of so many steps, on all ranks.  Collective, between windows."""
        assert report.recorder is not None, "the rank gives its report a recorder first"
        present = worker.group.gather(self.files.rank)
        started = time.perf_counter()
        taken = report.recorder.taken(self.kept_steps)
        rates = report.steps.learning_rates[self.kept_steps :] if report.steps else []
        self.files.append(
            self.files.history,
            ({**asdict(one), "rate": rate} for one, rate in zip(taken, rates, strict=True)),
        )
        self.kept_steps += len(taken)
        written = self.files.save(step, worker.checkpoint_state(), _state(report, self.kept_steps))
        if present[0] == self.files.rank:
            worker.checkpoint_servers(step)
        worker.group.barrier()
        self._note(step, time.perf_counter() - started, written, report)

    def _note(self, step: int, seconds: float, written: int, report: RankReport) -> None:
        record = CheckpointRecord(step=step, seconds=seconds, written_bytes=written)
        self._stand_at(step, record)
        report.checkpoints.append(record)

    def save_server(self, server: Server, report: RankReport) -> Callable[[int], None]:
        """What a server calls when a worker asks for a checkpoint."""

        def keep(step: int) -> None:
            started = time.perf_counter()
            written = self.files.save(step, server.checkpoint_state(), {})
            self._note(step, time.perf_counter() - started, written, report)

        return keep


def _state(report: RankReport, own_steps: int) -> dict[str, Any]:
    """What a rank's report has that its steps do not tell."""
    recorder, peak = report.recorder, report.cuda_peak
    assert recorder is not None, "the caller looked"
    return {
        "own_steps": own_steps,
        "initial_sha256": report.initial_sha256,
        "first_step_at_seconds": recorder.first_step_at_seconds,
        "windows": [asdict(window) for window in recorder.windows],
        "epochs": [
            [first, end, None if evaluation is None else asdict(evaluation)]
            for first, end, evaluation in report.epochs
        ],
        "data_errors": report.data_errors(),
        "peak_bytes": [peak.allocated_bytes, peak.reserved_bytes] if peak is not None else None,
    }


def _restore(
    report: RankReport, lines: list[dict[str, Any]], state: dict[str, Any], device: torch.device
) -> None:
    recorder, peak = report.recorder, report.cuda_peak
    assert recorder is not None, "the rank gives its report a recorder first"
    assert report.steps is not None, "and its steps"
    report.steps.learning_rates.extend(line.pop("rate") for line in lines)
    taken = [TakenStep(**line | {"sample_ids": tuple(line["sample_ids"])}) for line in lines]
    recorder.go_on_from(
        taken,
        losses=list(torch.tensor([one.loss for one in taken], device=device)),
        windows=[Window(**window) for window in state["windows"]],
        first_step_at_seconds=state["first_step_at_seconds"],
    )
    report.epochs = [
        (first, end, None if evaluation is None else Evaluation(**evaluation))
        for first, end, evaluation in state["epochs"]
    ]
    report.initial_sha256 = state["initial_sha256"]
    report.earlier_data_errors = state["data_errors"]
    if peak is not None and state["peak_bytes"] is not None:
        peak.allocated_bytes, peak.reserved_bytes = state["peak_bytes"]
