"""What a trial's ranks leave in its folder: watched, collected, and cleared away.  No torch."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Self

from pydantic_core import from_json

from shardmark.analysis.trial.raw_files import number
from shardmark.core.errors import FULL, InputError, StorageError
from shardmark.core.run_files import (
    LOG_FILE,
    RESULT_FILE,
    SAMPLES_FILE,
    STEPS_FILE,
    TRIAL_FILE,
    rank_file,
    rank_steps_file,
)
from shardmark.core.storage import storage_error
from shardmark.launch.outcome import Ending, ProcessEnd
from shardmark.measure.step.progress import read_progress
from shardmark.measure.system.sampler import SystemSampler
from shardmark.results.files import read_model, write_atomically
from shardmark.results.schema import RankRecord

AGENT_LOG = "agent.log"
"""What the launcher of this node prints."""
AGENT_FILE = "agent.json"
"""How ranks of this node ended badly."""
NODE_SAMPLES = "samples.node-{}.jsonl"
LOGS = "logs"
NUMBERED = "node-"
"""Start of the name of a launcher's folder whose ranks' folders bear the ranks' numbers."""
ROOM_BYTES = 2**16
"""A disk that has no room for as much has none for a record."""
MOST_LINE_BYTES = 2**24
MOST_LOG_BYTES = 2**23
"""Of what one rank prints to one stream."""
KEPT = {STEPS_FILE, SAMPLES_FILE, LOG_FILE, RESULT_FILE}


class RankSampler:
    """Samples ranks that are processes of this machine; their records tell which."""

    def __init__(
        self, directory: Path, file: str, ranks: Iterable[int], sample_seconds: float
    ) -> None:
        self._directory = directory
        self._file = directory / file
        self._ranks = tuple(ranks)
        self._sampler = SystemSampler(self._file, sample_seconds)
        self._records: dict[int, RankRecord] = {}
        self._trained_steps = 0

    def __enter__(self) -> Self:
        self._sampler.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Raise `StorageError` where a disk stopped the sampling; other reasons are in the file."""
        self._sampler.stop()
        stopped = self._sampler.error
        if error is None and isinstance(stopped, OSError) and stopped.errno in FULL:
            raise storage_error(self._file, stopped)

    def look(self) -> None:
        """See which ranks have started, and whether a rank has taken its last step."""
        started = {
            rank: record
            for rank in self._ranks
            if rank not in self._records and (record := self._record_of(rank)) is not None
        }
        if started:
            self._records |= started
            self._sampler.set_ranks(
                {rank: record.pid for rank, record in self._records.items()},
                gpu_uuids=[uuid for r in self._records.values() for uuid in r.device_uuids],
            )
        taken = self._steps_of_ended()
        if taken > self._trained_steps:
            self._trained_steps = taken
            self._sampler.sample_now()  # a short trial's ranks may be gone before the next one

    def _record_of(self, rank: int) -> RankRecord | None:
        with suppress(InputError):  # it is looked for again
            return rank_record(self._directory, rank)
        return None

    def _steps_of_ended(self) -> int:
        """How many steps ranks have taken that have no other left; 0 without such a rank.

        One rank is enough: another may be slow.
        """
        progress = (read_progress(self._directory, rank) for rank in self._ranks)
        ended = (told.steps for told in progress if told and told.steps == told.total_steps)
        return max(ended, default=0)


def rank_records(directory: Path, ranks: Iterable[int]) -> tuple[RankRecord, ...]:
    """The records of those ranks that wrote one."""
    records = (rank_record(directory, rank) for rank in ranks)
    return tuple(record for record in records if record is not None)


def rank_record(directory: Path, rank: int) -> RankRecord | None:
    """One rank's record; None where it wrote none.  `InputError` where it cannot be read now."""
    try:
        return read_model(RankRecord, directory / rank_file(rank))
    except (FileNotFoundError, ValueError):
        return None


def refuse_full(directory: Path, records: Iterable[RankRecord], ending: Ending) -> None:
    """Raise `StorageError` where ranks failed for want of a disk: no strategy is to blame."""
    for record in records:
        if record.error is not None and record.error.kind == "storage":
            found, _, remedy = record.error.message.rpartition("; ")
            found, remedy = (found, remedy) if found else (remedy, "see to that disk or limit")
            raise StorageError(f"rank {record.rank} on {record.host}", found, remedy)
    if ending.stopped_by_disk:
        remedy = "make room there and below TMPDIR, or see to those disks"
        raise StorageError(str(directory), "a disk stopped the trial", remedy)
    room = directory / ".room"
    write_atomically(room, bytes(ROOM_BYTES))
    room.unlink()


def process_ends(directory: Path) -> tuple[ProcessEnd, ...]:
    """How ranks ended badly, as their agent saw it."""
    try:
        ends = json.loads((directory / AGENT_FILE).read_text())
        return tuple(ProcessEnd(**end) for end in ends)
    except (OSError, ValueError, TypeError):
        return ()


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a JSON-lines file; a line cut short by a kill ends it."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for text in iter(partial(file.readline, MOST_LINE_BYTES), b""):
            try:
                line = from_json(text)
            except ValueError:
                return
            if isinstance(line, dict):
                yield line


def merge_steps(directory: Path, processes: int) -> None:
    """All ranks' step marks in one file, in order of rank."""
    with (directory / STEPS_FILE).open("w") as merged:
        for rank in range(processes):
            part = directory / rank_steps_file(rank)
            if part.exists():
                with part.open(errors="replace") as lines:
                    shutil.copyfileobj(lines, merged)


def merge_samples(directory: Path) -> None:
    """The samples of several nodes in one file in order of time, each line with its node."""
    lines: list[tuple[float, str]] = []
    parts = sorted(directory.glob(NODE_SAMPLES.format("*")))
    for part in parts:
        node = int(part.name.removeprefix("samples.node-").partition(".")[0])
        for line in read_lines(part):
            told = line if len(parts) == 1 else {"node": node, **line}
            if (at_seconds := number(line.get("at_seconds"))) is not None:
                lines.append((at_seconds, json.dumps(told, separators=(",", ":"))))
    with (directory / SAMPLES_FILE).open("w") as merged:
        merged.writelines(f"{text}\n" for _, text in sorted(lines))


def number_logs(directory: Path, node: int, ranks: Sequence[int]) -> None:
    """Name the folders of the ranks' output, which have local ranks' numbers, by the ranks.

    A launcher's folder of which that has been done is named by its node, and left alone: other
    nodes' folders may arrive beside it at any time.
    """
    launchers = [
        folder for folder in (directory / LOGS).glob("*") if not folder.name.startswith(NUMBERED)
    ]
    for attempt in (attempt for folder in launchers for attempt in folder.glob("attempt_*")):
        present = [
            (attempt / str(local), attempt / f"r{rank}")
            for local, rank in enumerate(ranks)
            if (attempt / str(local)).is_dir()
        ]
        for before, after in present:
            before.rename(after)
        for _, after in present:  # when none has an old number any more
            after.rename(after.with_name(after.name.removeprefix("r")))
    for folder in launchers:
        folder.rename(folder.with_name(f"{NUMBERED}{node}-{folder.name}"))


def merge_logs(directory: Path) -> None:
    """All ranks' output in one file, each line headed by its rank, and the launcher's last."""
    by_rank = sorted((directory / LOGS).glob("*/attempt_*/*/*.log"), key=_rank_stream_attempt)
    heads = {log: f"rank {log.parent.name} {log.stem}" for log in by_rank}
    for log in sorted(directory.glob("agent*.log")):
        node = log.stem.removeprefix("agent").replace(".node-", " of node ")
        heads[log] = f"launcher{node}"
    with (directory / LOG_FILE).open("w") as merged:
        for log, head in heads.items():
            merged.writelines(f"[{head}] {line}\n" for line in _last_lines(log))


def _last_lines(log: Path) -> list[str]:
    """All of a log that is not long."""
    with log.open("rb") as file:
        cut_bytes = max(0, file.seek(0, os.SEEK_END) - MOST_LOG_BYTES)
        file.seek(cut_bytes)
        lines = file.read(MOST_LOG_BYTES).decode(errors="replace").splitlines()
    return [f"(the first {cut_bytes:,} bytes are cut)", *lines] if cut_bytes else lines


def _rank_stream_attempt(log: Path) -> tuple[int, str, int]:
    """The attempt after how many restarts comes last."""
    return int(log.parent.name), log.stem, int(log.parent.parent.name.removeprefix("attempt_"))


def clear(directory: Path, *, keep: Iterable[str] = KEPT) -> None:
    """Remove everything from a trial's folder but its own files; what tells of it comes last."""
    if RESULT_FILE not in keep:
        (directory / RESULT_FILE).unlink(missing_ok=True)  # first: never without its files
    for path in sorted(directory.iterdir(), key=lambda path: path.name == TRIAL_FILE):
        if path.name in keep:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
