"""Files that ranks write in a trial's folder: reads, merges and removes them.  No torch."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Self

from pydantic_core import from_json

from shardmark.base.errors import FULL, STORAGE_EXIT, InputError, StorageError
from shardmark.base.files.run_files import (
    LOG_FILE,
    RESULT_FILE,
    SAMPLES_FILE,
    STEPS_FILE,
    TRIAL_FILE,
    rank_file,
    rank_steps_file,
)
from shardmark.base.files.storage import storage_error
from shardmark.base.results.files import read_model, write_atomically
from shardmark.base.results.schema import RankRecord
from shardmark.bench.analysis.trial.raw_files import number
from shardmark.bench.launch.outcome import Ending, ProcessEnd
from shardmark.ranks.measure.step.progress import read_progress
from shardmark.ranks.measure.system.sampler import SystemSampler

AGENT_LOG = "agent.log"
"""Output of the node's launcher."""
AGENT_FILE = "agent.json"
"""Ends of the node's ranks that failed."""
EXIT_FILE = "agent.exit"
"""Exit code of the node's launcher, of a trial that ran beside others."""
NODE_SAMPLES = "samples.node-{}.jsonl"
LOGS = "logs"
"""Folder of the ranks' output, with a folder for each rank."""
TEST_BYTES = 2**16
"""Bytes that are written to test whether a disk has room for a record."""
MAX_LINE_BYTES = 2**24
MAX_LOG_BYTES = 2**23
"""Length of the end of each rank's output stream that is stored."""
TRIAL_FILES = {STEPS_FILE, SAMPLES_FILE, LOG_FILE, RESULT_FILE}
"""Files of a finished trial."""


class RankSampler:
    """Samples ranks that run on this machine; their records have the process ids."""

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
        """Raise `StorageError` if a full disk stopped the sampling."""
        self._sampler.stop()
        stopped = self._sampler.error
        if error is None and isinstance(stopped, OSError) and stopped.errno in FULL:
            raise storage_error(self._file, stopped)

    def look(self) -> None:
        """Add ranks that have started, and sample once more after a rank's last step."""
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
        steps = self._steps_of_finished()
        if steps > self._trained_steps:
            self._trained_steps = steps
            self._sampler.sample_now()  # ranks of a short trial may end before the next sample

    def _record_of(self, rank: int) -> RankRecord | None:
        with suppress(InputError):  # the next look tries again
            return rank_record(self._directory, rank)
        return None

    def _steps_of_finished(self) -> int:
        """Return the steps of ranks that have taken all of theirs; 0 without such a rank.

        One rank is enough: another may be slow.
        """
        ranks = (read_progress(self._directory, rank) for rank in self._ranks)
        finished = (rank.steps for rank in ranks if rank and rank.steps == rank.total_steps)
        return max(finished, default=0)


def rank_records(directory: Path, ranks: Iterable[int]) -> tuple[RankRecord, ...]:
    """Return the records of the ranks that wrote one."""
    records = (rank_record(directory, rank) for rank in ranks)
    return tuple(record for record in records if record is not None)


def rank_record(directory: Path, rank: int) -> RankRecord | None:
    """Return the rank's record, or None.  Raises `InputError` if it cannot be read now."""
    try:
        return read_model(RankRecord, directory / rank_file(rank))
    except (FileNotFoundError, ValueError):
        return None


def raise_disk_error(directory: Path, records: Iterable[RankRecord], ending: Ending) -> None:
    """Raise `StorageError` if ranks failed because of a disk, which is no strategy's fault."""
    for record in records:
        if record.error is not None and record.error.kind == "storage":
            problem, _, remedy = record.error.message.rpartition("; ")
            if not problem:
                problem, remedy = remedy, "check that disk or limit"
            raise StorageError(f"rank {record.rank} on {record.host}", problem, remedy)
    codes = (ending.agent_exit_code, *(end.exit_code for end in ending.failures))
    if STORAGE_EXIT in codes:  # the process could not write a record of it
        remedy = "make room there and below TMPDIR, or check those disks"
        raise StorageError(str(directory), "a disk error stopped the trial", remedy)
    test_file = directory / ".room"
    write_atomically(test_file, bytes(TEST_BYTES))
    test_file.unlink()


def process_ends(directory: Path) -> tuple[ProcessEnd, ...]:
    """Return the ends of ranks that failed, as their agent saw them."""
    try:
        ends = json.loads((directory / AGENT_FILE).read_text())
        return tuple(ProcessEnd(**end) for end in ends)
    except (OSError, ValueError, TypeError):
        return ()


def agent_exit_code(directory: Path, *, otherwise: int) -> int:
    """Return the exit code of the agent of a trial that ran beside others, if it has ended."""
    file = directory / EXIT_FILE
    return int(file.read_text()) if file.exists() else otherwise


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSON-lines file up to a line that a kill has cut short."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for text in iter(partial(file.readline, MAX_LINE_BYTES), b""):
            try:
                line = from_json(text)
            except ValueError:
                return
            if isinstance(line, dict):
                yield line


def merge_steps(directory: Path, processes: int) -> None:
    """Merge the step files of all ranks into one, in order of rank."""
    with (directory / STEPS_FILE).open("w") as merged:
        for rank in range(processes):
            steps = directory / rank_steps_file(rank)
            if steps.exists():
                with steps.open(errors="replace") as lines:
                    shutil.copyfileobj(lines, merged)


def merge_samples(directory: Path) -> None:
    """Merge the samples of all nodes into one file in order of time, each line with its node."""
    lines: list[tuple[float, str]] = []
    files = sorted(directory.glob(NODE_SAMPLES.format("*")))
    for file in files:
        node = int(file.name.removeprefix("samples.node-").partition(".")[0])
        for line in read_lines(file):
            sample = line if len(files) == 1 else {"node": node, **line}
            if (at_seconds := number(line.get("at_seconds"))) is not None:
                lines.append((at_seconds, json.dumps(sample, separators=(",", ":"))))
    with (directory / SAMPLES_FILE).open("w") as merged:
        merged.writelines(f"{text}\n" for _, text in sorted(lines))


def merge_logs(directory: Path) -> None:
    """Merge the output of all ranks, and then the launchers', into one file with prefixed lines."""
    logs = (directory / LOGS).glob("*/*.log")
    by_rank = sorted(logs, key=lambda log: (int(log.parent.name), log.stem))
    prefixes = {log: f"rank {log.parent.name} {log.stem}" for log in by_rank}
    for log in sorted(directory.glob("agent*.log")):
        node = log.stem.removeprefix("agent").replace(".node-", " of node ")
        prefixes[log] = f"launcher{node}"
    with (directory / LOG_FILE).open("w") as merged:
        for log, prefix in prefixes.items():
            merged.writelines(f"[{prefix}] {line}\n" for line in _last_lines(log))


def _last_lines(log: Path) -> list[str]:
    """Return the lines at the end of a log, after a note if its beginning is cut."""
    with log.open("rb") as file:
        cut_bytes = max(0, file.seek(0, os.SEEK_END) - MAX_LOG_BYTES)
        file.seek(cut_bytes)
        lines = file.read(MAX_LOG_BYTES).decode(errors="replace").splitlines()
    return [f"(the first {cut_bytes:,} bytes are cut)", *lines] if cut_bytes else lines


def clear(directory: Path, *, keep: Iterable[str] = TRIAL_FILES) -> None:
    """Remove all other files from a trial's folder; the trial's description goes last."""
    if RESULT_FILE not in keep:
        # The result goes first, so that no result is without its files.
        (directory / RESULT_FILE).unlink(missing_ok=True)
    for path in sorted(directory.iterdir(), key=lambda path: path.name == TRIAL_FILE):
        if path.name in keep:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
