"""Writes the files of one rank, its record and its step times, each atomically."""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor, nn

from shardmark.base.errors import StorageError
from shardmark.base.files.run_files import rank_file, rank_steps_file
from shardmark.base.results.files import write_atomically
from shardmark.base.results.schema import (
    EpochRecord,
    ExchangeRecord,
    ProbeRecord,
    RankError,
    RankRecord,
    WindowRecord,
)
from shardmark.base.system.environment_variables import NODE_VARIABLE
from shardmark.ranks.measure.kernel_files import read_kernel_file
from shardmark.ranks.measure.memory.tensors import CudaPeak
from shardmark.ranks.measure.step.recorder import RecordedStep, Recorder
from shardmark.ranks.strategies.base import Worker
from shardmark.ranks.workloads.base import Workload

if TYPE_CHECKING:
    from shardmark.ranks.measure.step.compilation import Compilation

SPANS = ("step", "data", "forward", "backward", "pipeline", "optimizer")


def weights_sha256(named: Iterable[tuple[str, Tensor]]) -> str:
    """Return a hash of names, types, shapes and values; `named` is in order of name."""
    digest = hashlib.sha256()
    for name, value in named:
        tensor = value.detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def structure_sha256(model: nn.Module) -> str:
    """Return a hash of modules, their settings, and names, types and shapes of their tensors."""
    tensors = (*model.named_parameters(), *model.named_buffers())
    lines = [f"{name} {t.dtype} {tuple(t.shape)} {t.requires_grad}" for name, t in tensors]
    layers = re.sub(r" at 0x[0-9a-f]+", "", repr(model))  # where an object lies in memory
    return hashlib.sha256("\n".join([layers, *lines]).encode()).hexdigest()


def sample_order_sha256(steps: Iterable[Sequence[int]]) -> str:
    """Return a hash of the sample ids of every step, in the order of training."""
    digest = hashlib.sha256()
    for sample_ids in steps:
        digest.update(np.asarray(sample_ids, dtype="<i8").tobytes())
        digest.update(b";")
    return digest.hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Time and quality of an evaluation."""

    seconds: float
    quality: dict[str, float | None]


class RankReport:
    """The results of one rank so far, which can be written at any time."""

    def __init__(self, directory: Path, rank: int) -> None:
        self._directory = directory
        self._rank = rank
        self._device = "unknown"
        self._device_uuids: tuple[str, ...] = ()
        self._threads = 0
        self.role: Literal["worker", "server"] = "worker"
        self.counts_samples = True
        """False if another rank counts the samples of the same share."""
        self.recorder: Recorder | None = None
        self.worker: Worker | None = None
        self.workload: Workload | None = None
        """None for a script, whose samples have no numbers."""
        self.tokens: Sequence[int] | None = None
        """Tokens of each step of a script; None if its samples have none."""
        self.compilation: Compilation | None = None
        self.cuda_peak: CudaPeak | None = None
        self.epochs: list[tuple[int, int, Evaluation | None]] = []
        """First step, end step and evaluation of each epoch."""
        self.initial_sha256: str | None = None
        """Hash of the weights that the training began with."""
        self.final_sha256: str | None = None
        """Hash of the weights at the end of the recipe, before steps are added for measuring."""
        self.trained_steps: int | None = None
        """Number of this rank's steps at the end of the recipe."""
        self.skipped_steps: int | None = None
        """Number of skipped steps at the end of the recipe."""
        self.steps_per_epoch: int | None = None
        self.settings: Mapping[str, object] = {}
        self.structure_sha256: str | None = None
        self.probe: ProbeRecord | None = None
        self.exchange: ExchangeRecord | None = None
        self.error: RankError | None = None

    @property
    def compile_seconds(self) -> float:
        """Time that torch.compile has taken so far."""
        return self.compilation.seconds if self.compilation else 0.0

    def describe(self, devices: Sequence[torch.device], threads: int) -> None:
        """Record the devices of this process, and write the record, which names the process."""
        self._threads = threads
        self._device = devices[0].type
        if self._device == "cuda":
            properties = [torch.cuda.get_device_properties(device) for device in devices]
            self._device = properties[0].name
            self._device_uuids = tuple(str(device.uuid) for device in properties)
        self.write()  # the sampler reads the process id

    def end_epoch(self, end_step: int, evaluation: Evaluation | None) -> None:
        first_step = self.epochs[-1][1] if self.epochs else 0
        self.epochs.append((first_step, end_step, evaluation))

    def end_training(self, own_steps: int, weights_sha256: str) -> None:
        """Record the end of the recipe; later steps are added for measuring."""
        self.trained_steps, self.final_sha256 = own_steps, weights_sha256
        self.skipped_steps = self._skipped_steps()

    def data_errors(self) -> list[str]:
        """Return the messages on samples that could not be read, each once."""
        return list(dict.fromkeys(self.workload.data_errors)) if self.workload else []

    def write(self) -> None:
        """Write all results so far, atomically."""
        try:
            steps = self.recorder.recorded_steps() if self.recorder is not None else []
        except RuntimeError:
            if self.error is None:
                raise
            # A failed device answers no more requests; the original error is the one to keep.
            steps = self.recorder.flushed_steps if self.recorder is not None else []
        if steps:
            lines = "\n".join(map(json.dumps, self._step_lines(steps)))
            try:
                write_atomically(
                    self._directory / rank_steps_file(self._rank), f"{lines}\n".encode()
                )
            except StorageError:
                if self.error is None:
                    raise
        record = self._record(steps).model_dump_json(indent=1)
        write_atomically(self._directory / rank_file(self._rank), record.encode())

    def _record(self, steps: Sequence[RecordedStep]) -> RankRecord:
        recorder, peak, compilation = self.recorder, self.cuda_peak, self.compilation
        boot_id = read_kernel_file(Path("/proc/sys/kernel/random/boot_id"))  # the kernel's
        sample_ids = recorder.sample_ids if recorder else []
        counted = sample_ids if self.counts_samples else []
        trained = sample_ids[: self.trained_steps]
        measured = [counted[step] for step in self._measured_steps()] if counted else []
        nonfinite = [
            (number, "NaN" if math.isnan(step.loss) else "infinite")
            for number, step in enumerate(steps[: self.trained_steps])
            if step.loss is not None and not math.isfinite(step.loss)
        ]
        tokens = self.workload.tokens_in(measured) if self.workload else None
        if self.tokens is not None:
            tokens = sum(self.tokens[step] for step in self._measured_steps())
        return RankRecord(
            rank=self._rank,
            role=self.role,
            host=platform.node(),
            node=int(os.environ.get(NODE_VARIABLE, "0")),
            kernel=hashlib.sha256(boot_id.encode()).hexdigest()[:12] if boot_id else None,
            local_rank=int(os.environ["LOCAL_RANK"]) if "LOCAL_RANK" in os.environ else None,
            pid=os.getpid(),
            device=self._device,
            device_uuids=self._device_uuids,
            threads=self._threads,
            first_step_at_seconds=recorder.first_step_at_seconds if recorder else None,
            windows=tuple(WindowRecord(**asdict(w)) for w in recorder.windows) if recorder else (),
            synthetic=self.workload.synthetic if self.workload else False,
            steps_per_epoch=self.steps_per_epoch,
            samples=sum(map(len, measured)),
            tokens=tokens,
            samples_total=sum(map(len, counted[: self.trained_steps])),
            epochs=tuple(self._epoch_records(steps)),
            evaluation_seconds=tuple(e.seconds for *_, e in self.epochs if e is not None),
            compile_seconds=compilation.seconds if compilation else None,
            recompilations=compilation.in_windows if compilation else None,
            peak_memory_bytes=peak.allocated_bytes if peak else None,
            peak_reserved_bytes=peak.reserved_bytes if peak else None,
            nonfinite_steps=len(nonfinite),
            first_nonfinite=next(iter(nonfinite), None),
            skipped_steps=self._skipped_steps(),
            data_errors=tuple(self.data_errors()),
            better=dict(self.workload.better) if self.workload else {},
            corpora=dict(self.workload.corpora) if self.workload else {},
            initial_weights_sha256=self.initial_sha256,
            final_weights_sha256=self.final_sha256,
            sample_order_sha256=sample_order_sha256(trained) if trained and self.workload else None,
            structure_sha256=self.structure_sha256,
            probe=self.probe,
            exchange=self.exchange,
            settings={
                **self.settings,
                **self._parameter_groups(),
                **(self.workload.settings if self.workload else {}),
                **(self.worker.settings() if self.worker else {}),
            },
            error=self.error,
        )

    def _skipped_steps(self) -> int:
        """Return the number of skipped steps, without those that are added for measuring."""
        if self.skipped_steps is not None:
            return self.skipped_steps
        try:
            return self.worker.skipped_steps() if self.worker else 0
        except RuntimeError:  # the number is on the failed device
            if self.error is None:
                raise
            return 0

    def _parameter_groups(self) -> dict[str, object]:
        """Return the size and the options of each parameter group that the task defines."""
        groups = self.workload.parameter_groups if self.workload else ()
        settings = [{"parameters": len(group.names), **group.options} for group in groups]
        return {"parameter_groups": settings} if settings else {}

    def _measured_steps(self) -> list[int]:
        windows = self.recorder.windows if self.recorder else []
        return [step for window in windows for step in range(window.first_step, window.end_step)]

    def _epoch_records(self, steps: Sequence[RecordedStep]) -> Iterator[EpochRecord]:
        for index, (first, end, evaluation) in enumerate(self.epochs):
            losses = [step.loss for step in steps[first:end] if step.loss is not None]
            finite = [loss for loss in losses if math.isfinite(loss)]
            complete = len(finite) == end - first > 0
            yield EpochRecord(
                epoch=index,
                first_step=first,
                end_step=end,
                train_loss=sum(finite) / len(finite) if complete else None,
                evaluation_seconds=evaluation.seconds if evaluation else None,
                quality=evaluation.quality if evaluation else None,
            )

    def _step_lines(self, steps: Sequence[RecordedStep]) -> Iterator[dict[str, object]]:
        measured = set(self._measured_steps())
        ends = [end_step for _, end_step, _ in self.epochs]
        trained = len(steps) if self.trained_steps is None else self.trained_steps
        for index, step in enumerate(steps):
            yield {
                "rank": self._rank,
                "step": index,
                "epoch": sum(end <= index for end in ends) if index < trained else None,
                "measured": index in measured,
                "samples": len(step.sample_ids),
                "loss": step.loss if step.loss is not None and math.isfinite(step.loss) else None,
                "learning_rate": step.learning_rate,
                "started_at_seconds": step.started_at_seconds,
                **{f"{name}_seconds": step.seconds.get(name) for name in SPANS},
            }
