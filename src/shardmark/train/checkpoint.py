"""One rank's checkpoints: written between windows, and what a restarted training goes on from."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardmark.core.environment_variables import LAUNCHED_VARIABLE, RESTART_VARIABLE
from shardmark.measure.step.recorder import RecordedStep, Window
from shardmark.results.schema import CheckpointRecord, ResumeRecord
from shardmark.strategies.base import CheckpointState, RankContext, Server, Worker
from shardmark.train.checkpoint_folder import (
    ABSENT_FILE,
    check_writable,
    folder_of_rank,
    not_writable,
    rank_folder,
)
from shardmark.train.record import Evaluation, RankReport
from shardmark.trials.trial import Trial

_PART = ".part"


@dataclass(frozen=True, slots=True)
class CheckpointFiles:
    """One rank's on its node's disk: a file for each, there whole or not at all.

    `leads` where this rank writes what all ranks of the node hold alike.  It writes that first, so
    that a step of which every rank has its own file is complete.
    """

    folder: Path
    """The node's."""
    rank: int
    leads: bool

    @property
    def own(self) -> Path:
        return rank_folder(self.folder, self.rank)

    @property
    def shared(self) -> Path:
        return self.folder / "shared"

    @property
    def history(self) -> Path:
        """A line for each step, of all checkpoints."""
        return self.own / "history.jsonl"

    @property
    def starts(self) -> Path:
        """A line for each time at which the training stood at a checkpoint."""
        return self.own / "starts.jsonl"

    def steps(self) -> list[int]:
        """Of this rank's whole checkpoints, in order."""
        return sorted(_checkpoints(self.own))

    def save(self, step: int, state: CheckpointState, progress: Mapping[str, Any]) -> int:
        """Write a checkpoint, keep the one before and drop older ones; the bytes written."""
        newest = self.steps()[-1:]
        self.drop(lambda old: old not in newest)
        content = {
            "own": _compact(state.own),
            "counts": dict(state.counts),
            "progress": dict(progress),
            "shares": bool(state.shared),
        }
        written = 0
        try:
            if self.leads and state.shared:
                written += _write(self.shared / f"step-{step}", _compact(state.shared))
            return written + _write(self.own / f"step-{step}", content)
        except OSError as error:
            raise not_writable(self.folder, error) from error

    def load(self, step: int) -> tuple[CheckpointState, dict[str, Any]]:
        """The checkpoint of that step, on the CPU, and the progress saved with it."""
        content = _read(self.own / f"step-{step}")
        shared = _read(self.shared / f"step-{step}") if content["shares"] else {}
        state = CheckpointState(own=content["own"], shared=shared, counts=content["counts"])
        return state, content["progress"]

    def drop(self, unwanted: Callable[[int], bool]) -> None:
        """Remove the checkpoints whose step is unwanted, and unfinished ones."""
        for folder in (self.own, *([self.shared] if self.leads else [])):
            for path in folder.glob(f"step-*{_PART}"):
                path.unlink()
            for step, path in _checkpoints(folder).items():
                if unwanted(step):
                    path.unlink()

    def append(self, file: Path, lines: Iterable[Mapping[str, Any]]) -> None:
        try:
            self.own.mkdir(parents=True, exist_ok=True)
            with file.open("a") as opened:
                opened.writelines(json.dumps(line) + "\n" for line in lines)
        except OSError as error:
            raise not_writable(self.folder, error) from error

    def lines(self, file: Path) -> list[dict[str, Any]]:
        """The objects of a file of lines; one that was cut short is left out."""
        read: list[dict[str, Any]] = []
        for line in file.read_text().splitlines() if file.exists() else ():
            try:
                read.append(json.loads(line))
            except ValueError:
                break
        return read

    def cut(self, file: Path, lines: Sequence[Mapping[str, Any]]) -> None:
        """Have the file hold these lines and no others."""
        part = file.with_suffix(_PART)
        part.write_text("".join(json.dumps(line) + "\n" for line in lines))
        part.replace(file)


def newest_common(offers: Sequence[Sequence[int] | None]) -> int:
    """The last step of which every rank has a checkpoint; 0 where there is none.

    None is a rank that can be missed.
    """
    given = [set(offer) for offer in offers if offer is not None]
    common = set.intersection(*given) if given else set()
    return max(common, default=0)


def _checkpoints(folder: Path) -> dict[int, Path]:
    numbered = {path.name.removeprefix("step-"): path for path in folder.glob("step-*")}
    return {int(step): path for step, path in numbered.items() if step.isdecimal()}


def _compact(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors without the rest of a larger storage that they are views of."""
    return {
        name: t if t.untyped_storage().nbytes() == t.numel() * t.element_size() else t.clone()
        for name, t in tensors.items()
    }


def _write(path: Path, content: Mapping[str, Any]) -> int:
    """A finished file gets its name in one piece; its bytes."""
    part = path.with_suffix(_PART)
    part.parent.mkdir(parents=True, exist_ok=True)
    try:
        with part.open("wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        part.unlink(missing_ok=True)  # on a full disk the rank's record needs the room
        raise
    part.replace(path)
    return path.stat().st_size


def _read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return content


@dataclass(slots=True, kw_only=True)
class Checkpoints:
    """Keeps one rank's, of a trial that may be restarted."""

    files: CheckpointFiles
    every_steps: int
    first_step: int
    """Steps that the training has taken already."""
    restart: int
    launched_at_seconds: float
    clock: Callable[[], float] = time.time
    saved_steps: int = field(default=0, init=False)
    """How many of this rank's own steps are in its history."""

    @classmethod
    def joined(cls, trial: Trial, directory: Path, context: RankContext) -> Checkpoints | None:
        """Agree with all ranks, servers too, on where to begin; None without restarts.

        Collective.
        """
        if not trial.limits.max_restarts:
            return None
        files = CheckpointFiles(
            folder_of_rank(directory), context.rank, leads=context.local_rank == 0
        )
        check_writable(files.own)
        absent = files.own / ABSENT_FILE
        offer = None if absent.exists() else files.steps()
        offers: list[Any] = [None] * context.world_size
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
            server.load_checkpoint_state(self.files.load(self.first_step)[0])
            report.checkpoints = self._written_before()

    def restore_worker(self, worker: Worker, report: RankReport) -> None:
        """Have it and its report go on from the checkpoint, if there is one."""
        step = max((s for s in self.files.steps() if s <= self.first_step), default=0)
        self._forget_later()
        if not step:
            if self.restart:
                self.files.cut(self.files.history, ())
            return
        state, progress = self.files.load(step)
        worker.load_checkpoint_state(state)
        lines = self.files.lines(self.files.history)[: progress["own_steps"]]
        self.files.cut(self.files.history, lines)
        self.saved_steps = len(lines)
        _restore(report, lines, progress)
        report.checkpoints = self._written_before()
        if lines:
            worker.set_learning_rate(lines[-1]["learning_rate"])

    def _forget_later(self) -> None:
        """A checkpoint that some rank lacks is of no use."""
        self.files.drop(lambda step: step > self.first_step)

    def training_goes_on(self, report: RankReport) -> None:
        """The first step comes next: what was lost since training had last stood here ends now."""
        starts = self.files.lines(self.files.starts)
        start = {"step": self.first_step, "at_seconds": self.clock()}
        if self.restart:
            stood = [past["at_seconds"] for past in starts if past["step"] == self.first_step]
            since = max(stood, default=self.launched_at_seconds)
            start |= {
                "restart": self.restart,
                "lost_seconds": max(0.0, start["at_seconds"] - since),
            }
        self.files.append(self.files.starts, [start])
        everything = (*starts, start)
        report.resumes = [ResumeRecord(**past) for past in everything if "lost_seconds" in past]

    def _written_before(self) -> list[CheckpointRecord]:
        """The checkpoints up to the one that is gone on from."""
        stored = [start.get("checkpoint") for start in self.files.lines(self.files.starts)]
        last = {c["step"]: CheckpointRecord(**c) for c in stored if c is not None}
        return [last[step] for step in sorted(last) if step <= self.first_step]

    def save(self, step: int, worker: Worker, report: RankReport) -> None:
        """Write the checkpoint of so many steps, on all ranks.  Collective, between windows."""
        assert report.recorder is not None, "the rank gives its report a recorder first"
        present = worker.group.gather(self.files.rank)
        started = time.perf_counter()
        taken = report.recorder.steps_since(self.saved_steps)
        self.files.append(self.files.history, map(asdict, taken))
        self.saved_steps += len(taken)
        progress = _progress(report, self.saved_steps)
        written = self.files.save(step, worker.checkpoint_state(), progress)
        if present[0] == self.files.rank:
            worker.checkpoint_servers(step)
        worker.group.barrier()
        self._note(step, time.perf_counter() - started, written, report)

    def save_server(self, server: Server, report: RankReport) -> Callable[[int], None]:
        """What a server calls when a worker asks for a checkpoint."""

        def save(step: int) -> None:
            started = time.perf_counter()
            written = self.files.save(step, server.checkpoint_state(), {})
            self._note(step, time.perf_counter() - started, written, report)

        return save

    def _note(self, step: int, seconds: float, written: int, report: RankReport) -> None:
        record = CheckpointRecord(step=step, seconds=seconds, written_bytes=written)
        report.checkpoints.append(record)
        start = {"step": step, "at_seconds": self.clock(), "checkpoint": record.model_dump()}
        self.files.append(self.files.starts, [start])


def _progress(report: RankReport, own_steps: int) -> dict[str, Any]:
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
    report: RankReport,
    lines: list[dict[str, Any]],
    progress: dict[str, Any],
) -> None:
    recorder, peak = report.recorder, report.cuda_peak
    assert recorder is not None, "the rank gives its report a recorder first"
    recorder.go_on_from(
        [RecordedStep(**line | {"sample_ids": tuple(line["sample_ids"])}) for line in lines],
        windows=[Window(**window) for window in progress["windows"]],
        first_step_at_seconds=progress["first_step_at_seconds"],
    )
    report.epochs = [
        (first, end, None if evaluation is None else Evaluation(**evaluation))
        for first, end, evaluation in progress["epochs"]
    ]
    report.initial_sha256 = progress["initial_sha256"]
    report.earlier_data_errors = progress["data_errors"]
    if peak is not None and progress["peak_bytes"] is not None:
        peak.allocated_bytes, peak.reserved_bytes = progress["peak_bytes"]
