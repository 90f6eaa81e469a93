"""Samples a running trial's processes, network and GPUs from outside.  Linux only, without torch.

The sampler runs in a thread of the controller, so that no rank ever waits for it.  It needs /proc
with task/TID/children (`CONFIG_PROC_CHILDREN`, which distributions set).
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from shardmark.base.system.processes import schedule_as_batch
from shardmark.ranks.measure.network.interfaces import network_counters, nvlink_counters
from shardmark.ranks.measure.system.gpus import GpuReader
from shardmark.ranks.measure.system.machine_load import MachineLoad
from shardmark.ranks.measure.system.process_tree import THREADS_PER_READING, ProcessTree

FLUSH_SECONDS = 5.0
DESCENDANTS_EVERY = 4
"""Number of samples between two searches for new data-loader workers."""

_BUFFER_BYTES = 256 * 1024


class SystemSampler:
    """Writes a line of `samples.jsonl` every `sample_seconds`, and one at the start and the end.

    Never raises after the start: the error that stops it is in `error` and in a last line.
    """

    def __init__(
        self,
        path: Path,
        sample_seconds: float,
        *,
        clock: Callable[[], float] = time.time,
        network: Callable[[], Mapping[str, Mapping[str, int]]] = network_counters,
        open_gpus: Callable[[Iterable[str]], GpuReader] = GpuReader,
        proc: Path = Path("/proc"),
    ) -> None:
        self.error: Exception | None = None
        """The error that ended the sampling early."""
        self._path = path
        self._sample_seconds = sample_seconds
        self._clock = clock
        self._network = network
        self._open_gpus = open_gpus
        self._proc = proc
        self._machine = MachineLoad(proc)
        self._lock = threading.Lock()  # one sampling at a time, also from `sample_now`
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._file: TextIO | None = None
        self._flushed_at = 0.0
        self._trees: dict[int, ProcessTree] = {}
        self._gpus: GpuReader | None = None
        self._gpu_uuids: frozenset[str] = frozenset()
        self._nvlink_uuids: set[object] = set()
        """UUIDs of the devices that have reported NVLink counters."""
        self._sample_count = 0
        self._threads_seen = 0

    def start(self) -> None:
        """Open the file, take the first sample now, and start the thread that takes the others."""
        assert self._file is None, "a sampler is started once"
        self._file = self._path.open("a", encoding="utf-8", buffering=_BUFFER_BYTES)
        self._flushed_at = self._clock()
        self.sample_now()
        self._thread = threading.Thread(target=self._run, name="shardmark-sampler", daemon=True)
        self._thread.start()

    def set_ranks(self, pids: Mapping[int, int], gpu_uuids: Iterable[str] = ()) -> None:
        """Set the processes and CUDA devices of the ranks, and take a sample.

        NVML is loaded for the first device, and not at all without one.
        """
        uuids = frozenset(gpu_uuids)
        with self._lock:
            self._trees = {
                rank: tree
                if (tree := self._trees.get(rank)) is not None and tree.pid == pid
                else ProcessTree(pid, self._proc)
                for rank, pid in sorted(pids.items())
            }
            if uuids != self._gpu_uuids:
                self._close_gpus()
                self._gpu_uuids = uuids
                self._gpus = self._open_gpus(uuids) if uuids else None
            self._sample_count = 0  # the next sample searches for descendants and reads all values
        self.sample_now()

    def sample_now(self) -> None:
        """Take an extra sample, for example when a rank is about to end."""
        with self._lock:
            if self._file is None or self.error is not None:
                return
            try:
                self._file.write(json.dumps(self._sample(), separators=(",", ":")) + "\n")
                self._flush_if_due()
            except Exception as error:  # must not stop the trial that it observes
                self.error = error
                line = {"at_seconds": self._clock(), "failure": f"{type(error).__name__}: {error}"}
                with suppress(Exception):
                    self._file.write(json.dumps(line, separators=(",", ":")) + "\n")

    def stop(self) -> None:
        """Take the last sample, and close the file.  Does nothing if not running."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        with self._lock:
            self._sample_count = 0
        self.sample_now()
        with self._lock:
            if self._file is not None:
                self._close_file(self._file)
                self._file = None
            self._close_gpus()

    def _run(self) -> None:
        schedule_as_batch()
        due = time.monotonic() + self._sample_seconds
        while not self._stopping.wait(max(0.0, due - time.monotonic())):
            self.sample_now()
            # Keep the period; samples that were missed are skipped.
            missed = max(0.0, time.monotonic() - due) // self._sample_seconds
            due += self._sample_seconds * (missed + 1)

    def _sample(self) -> dict[str, object]:
        at_seconds = self._clock()
        # With many threads the costly values are read less often, except in the first sample.
        stride = 1 + self._threads_seen // THREADS_PER_READING
        context_switches = self._sample_count % stride == 0
        refresh = self._sample_count % (DESCENDANTS_EVERY * stride) == 0
        self._sample_count += 1
        readings: dict[int, dict[str, object]] = {}
        for rank, tree in self._trees.items():
            if refresh:
                tree.refresh()
            values = tree.read(context_switches=context_switches)
            if values is not None:
                readings[rank] = values
        self._threads_seen = sum(int(str(values["threads"])) for values in readings.values())
        pids = {rank: self._trees[rank].pids for rank in readings}
        gpus = self._gpus.read(pids) if self._gpus is not None else []
        return {
            "at_seconds": at_seconds,
            "machine": self._machine.read(),
            "ranks": [{"rank": rank, **values} for rank, values in readings.items()],
            "network": {**self._network(), **nvlink_counters(gpus, self._nvlink_uuids)},
            "gpus": gpus,
        }

    def _flush_if_due(self) -> None:
        now = self._clock()
        if self._file is not None and now - self._flushed_at >= FLUSH_SECONDS:
            self._file.flush()
            self._flushed_at = now

    def _close_file(self, file: TextIO) -> None:
        try:
            file.close()
        except OSError as error:  # a full disk raises when the buffer is written
            self.error = self.error or error

    def _close_gpus(self) -> None:
        if self._gpus is not None:
            self._gpus.close()
