"""What one rank leaves behind: its record and its raw step marks, whole or not at all."""

from __future__ import annotations

import json
import math
import os
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from shardmark.core.environment_variables import NODE_VARIABLE
from shardmark.core.run_files import rank_file, rank_steps_file
from shardmark.measure.memory.cuda_memory import CudaPeak
from shardmark.measure.step.recorder import Recorder
from shardmark.results.schema import (
    CheckpointRecord,
    EpochRecord,
    ExchangeRecord,
    ProbeRecord,
    RankError,
    RankRecord,
    ResumeRecord,
    WindowRecord,
)
from shardmark.strategies.base import Worker
from shardmark.train.identity import sample_order_sha256, weights_sha256
from shardmark.train.loop import Steps
from shardmark.workloads.base import Workload

SPANS = ("step", "data", "forward", "backward", "optimizer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """One pass over the validation set."""

    seconds: float
    quality: dict[str, float | None]


class RankReport:
    """Collects what a rank knows as it comes to know it, so that a failure loses nothing."""

    def __init__(self, directory: Path, rank: int) -> None:
        self._directory = directory
        self._rank = rank
        self._device = "unknown"
        self._device_uuid: str | None = None
        self._threads = 0
        self._final: str | None = None
        self.epochs: list[tuple[int, int, Evaluation | None]] = []
        """First step, one past the last, and the evaluation after it."""
        self.checkpoints: list[CheckpointRecord] = []
        self.resumes: list[ResumeRecord] = []
        self.initial_sha256: str | None = None
        """Of the weights that the training began with, before any restart."""
        self.earlier_data_errors: Sequence[str] = ()
        """Before a restart."""
        self.role: Literal["worker", "server"] = "worker"
        self.steps_per_epoch: int | None = None
        self.recorder: Recorder | None = None
        self.steps: Steps | None = None
        self.cuda_peak: CudaPeak | None = None
        self.worker: Worker | None = None
        self.workload: Workload | None = None
        self.settings: Mapping[str, object] = {}
        self.probe: ProbeRecord | None = None
        self.exchange: ExchangeRecord | None = None
        self.error: RankError | None = None

    def describe(self, device: torch.device, threads: int) -> None:
        self._threads = threads
        self._device = device.type
        if device.type == "cuda":
            properties = torch.cuda.get_device_properties(device)
            self._device, self._device_uuid = properties.name, str(properties.uuid)
        self.write()  # its process id lets the sampler find the rank

    def start_weights(self, parameters: Mapping[str, Tensor]) -> None:
        self.initial_sha256 = weights_sha256(parameters)

    def end_weights(self, parameters: Mapping[str, Tensor]) -> None:
        self._final = weights_sha256(parameters)

    def end_epoch(self, end_step: int, evaluation: Evaluation | None) -> None:
        first_step = self.epochs[-1][1] if self.epochs else 0
        self.epochs.append((first_step, end_step, evaluation))

    def data_errors(self) -> list[str]:
        """Those of all processes that have been this rank, each once."""
        own = self.workload.data_errors if self.workload else ()
        return list(dict.fromkeys((*self.earlier_data_errors, *own)))

    def write(self) -> None:
        """Leave everything known so far; a reader never sees half of it."""
        try:
            losses = self._losses()
            if self.recorder is not None and self.recorder.step:
                _replace(self._directory / rank_steps_file(self._rank), self._step_lines(losses))
        except RuntimeError:
            if self.error is None:
                raise
            losses = []  # a device that failed answers nothing any more; its error must not be lost
        _replace(
            self._directory / rank_file(self._rank), self._record(losses).model_dump_json(indent=1)
        )

    def _losses(self) -> list[float]:
        if self.recorder is None or not self.recorder.losses:
            return []
        return [
            float(x) for x in torch.stack([one.float() for one in self.recorder.losses]).tolist()
        ]

    def _record(self, losses: list[float]) -> RankRecord:
        recorder = self.recorder
        sample_ids = recorder.sample_ids if recorder else []
        windows = recorder.windows if recorder else []
        peak = self.cuda_peak
        return RankRecord(
            rank=self._rank,
            role=self.role,
            host=platform.node(),
            node=int(os.environ.get(NODE_VARIABLE, "0")),
            local_rank=int(os.environ["LOCAL_RANK"]) if "LOCAL_RANK" in os.environ else None,
            pid=os.getpid(),
            device=self._device,
            device_uuid=self._device_uuid,
            threads=self._threads,
            first_step_at_seconds=recorder.first_step_at_seconds if recorder else None,
            windows=tuple(
                WindowRecord(
                    first_step=window.first_step,
                    end_step=window.end_step,
                    started_at_seconds=window.started_at_seconds,
                    window_seconds=window.window_seconds,
                )
                for window in windows
            ),
            synthetic=self.workload.synthetic if self.workload else False,
            steps_per_epoch=self.steps_per_epoch,
            samples=sum(len(sample_ids[i]) for i in self._measured_steps()),
            samples_total=sum(len(ids) for ids in sample_ids),
            epochs=tuple(self._epoch_records(losses)),
            evaluation_seconds=tuple(e.seconds for *_, e in self.epochs if e is not None),
            peak_memory_bytes=peak.allocated_bytes if peak else None,
            peak_reserved_bytes=peak.reserved_bytes if peak else None,
            nonfinite_steps=sum(not math.isfinite(loss) for loss in losses),
            skipped_steps=self.worker.skipped_steps() if self.worker else 0,
            data_errors=tuple(self.data_errors()),
            initial_weights_sha256=self.initial_sha256,
            final_weights_sha256=self._final,
            sample_order_sha256=sample_order_sha256(sample_ids) if sample_ids else None,
            probe=self.probe,
            exchange=self.exchange,
            settings=dict(self.settings),
            checkpoints=tuple(self.checkpoints),
            resumes=tuple(self.resumes),
            error=self.error,
        )

    def _measured_steps(self) -> list[int]:
        windows = self.recorder.windows if self.recorder else []
        return [step for window in windows for step in range(window.first_step, window.end_step)]

    def _epoch_records(self, losses: list[float]) -> Iterator[EpochRecord]:
        for index, (first, end, evaluation) in enumerate(self.epochs):
            finite = [loss for loss in losses[first:end] if math.isfinite(loss)]
            complete = len(finite) == end - first > 0
            yield EpochRecord(
                epoch=index,
                first_step=first,
                end_step=end,
                train_loss=sum(finite) / len(finite) if complete else None,
                evaluation_seconds=evaluation.seconds if evaluation else None,
                quality=evaluation.quality if evaluation else None,
            )

    def _step_lines(self, losses: list[float]) -> str:
        recorder = self.recorder
        assert recorder is not None, "the caller looked"
        seconds = {name: recorder.seconds_by_step(name) for name in SPANS}
        starts = recorder.started_at_seconds_by_step()
        measured = set(self._measured_steps())
        lines = []
        for step in range(recorder.step):
            line: dict[str, Any] = {
                "rank": self._rank,
                "step": step,
                "epoch": sum(end <= step for _, end, _ in self.epochs),
                "measured": step in measured,
                "samples": len(recorder.sample_ids[step]),
                "loss": losses[step] if math.isfinite(losses[step]) else None,
                "learning_rate": self.steps.learning_rates[step] if self.steps else None,
                "started_at_seconds": starts[step],
            }
            line |= {f"{name}_seconds": seconds[name].get(step) for name in SPANS}
            lines.append(json.dumps(line))
        return "\n".join(lines) + "\n"


def _replace(path: Path, text: str) -> None:
    part = path.with_suffix(f".part-{time.monotonic_ns()}")
    part.write_text(text)
    part.replace(path)
