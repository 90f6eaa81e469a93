"""Samples the ranks of a trial that are processes of this machine.  Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Self

from shardmark.core.run_files import rank_file
from shardmark.launch.trial_artifacts import rank_record
from shardmark.measure.step.progress import reached
from shardmark.measure.system.sampler import SystemSampler
from shardmark.results.schema import RankRecord


class RankSampler:
    """Finds the ranks by the records that they leave in the trial's folder."""

    def __init__(
        self, directory: Path, file: str, ranks: Iterable[int], sample_seconds: float
    ) -> None:
        self._directory = directory
        self._ranks = tuple(ranks)
        self._sampler = SystemSampler(directory / file, sample_seconds)
        self._known: dict[int, RankRecord] = {}
        self._versions: dict[int, tuple[int, int]] = {}
        self._trained = False

    def __enter__(self) -> Self:
        self._sampler.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._sampler.stop()

    @property
    def memory_bytes(self) -> int | None:
        """Of the fullest rank or device, when last looked at."""
        return self._sampler.memory_bytes

    def look(self) -> None:
        """See which ranks have come or come back, and whether they have done their last step."""
        for rank in self._ranks:
            record = self._changed(rank)
            if record is None:
                continue
            known, self._known[rank] = self._known.get(rank), record
            if known is None or known.pid != record.pid:
                self._trained = False  # after a restart, the last step is still to come
                self._sampler.set_ranks(
                    {r: found.pid for r, found in self._known.items()},
                    gpu_uuids=[f.device_uuid for f in self._known.values() if f.device_uuid],
                )
        if not self._trained and self._all_steps_taken():
            self._trained = True
            self._sampler.sample_now()  # a short trial's ranks may be gone before the next one

    def _changed(self, rank: int) -> RankRecord | None:
        """The rank's record, if it is another one than at the last look."""
        try:
            found = (self._directory / rank_file(rank)).stat()
        except FileNotFoundError:  # not there yet, or removed for a restart
            return None
        version = found.st_ino, found.st_mtime_ns
        if self._versions.get(rank) == version:
            return None
        record = rank_record(self._directory, rank)
        if record is not None:
            self._versions[rank] = version
        return record

    def _all_steps_taken(self) -> bool:
        """Of any rank: one may be slow, or dead while the others train on."""
        told = (reached(self._directory, rank) for rank in self._ranks)
        return any(one is not None and one.steps == one.total_steps for one in told)
