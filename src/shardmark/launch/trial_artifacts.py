"""Collects what a trial's ranks left in its folder, and clears the rest away."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from shardmark.core.run_files import (
    LOG_FILE,
    LOST_FILE,
    SAMPLES_FILE,
    STEPS_FILE,
    rank_file,
    rank_steps_file,
)
from shardmark.launch.outcome import ProcessEnd
from shardmark.results.schema import RankRecord

AGENT_FILE = "agent.json"
NODE_SAMPLES = "samples.node-{}.jsonl"
LOGS = "logs"
KEPT = {STEPS_FILE, SAMPLES_FILE, LOG_FILE, "result.json"}


def rank_records(directory: Path, processes: int) -> tuple[RankRecord, ...]:
    """The records of all ranks that wrote one."""
    return tuple(
        record for rank in range(processes) if (record := rank_record(directory, rank)) is not None
    )


def rank_record(directory: Path, rank: int) -> RankRecord | None:
    """One rank's record; None where it wrote none."""
    try:
        record = RankRecord.model_validate_json((directory / rank_file(rank)).read_text())
    except (OSError, ValidationError):
        return None
    lost = directory / LOST_FILE.format(rank)
    return record.model_copy(update={"lost": lost.read_text()}) if lost.exists() else record


def process_ends(directory: Path) -> tuple[ProcessEnd, ...]:
    """How ranks ended badly, as their agent saw it."""
    try:
        ends = json.loads((directory / AGENT_FILE).read_text())
        return tuple(ProcessEnd(**end) for end in ends)
    except (OSError, ValueError):
        return ()


def merge_steps(directory: Path, processes: int) -> None:
    """All ranks' step marks in one file, in order of rank."""
    with (directory / STEPS_FILE).open("w") as merged:
        for rank in range(processes):
            part = directory / rank_steps_file(rank)
            if part.exists():
                merged.write(part.read_text())


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a JSON-lines file; a line cut short by a kill ends it."""
    if not path.exists():
        return
    with path.open() as file:
        for line in file:
            try:
                yield json.loads(line)
            except ValueError:
                return


def number_logs(directory: Path, ranks: Sequence[int]) -> None:
    """Name the folders of the ranks' output, which have local ranks' numbers, by the ranks."""
    for attempt in (directory / LOGS).glob("*/attempt_*"):
        found = [(attempt / str(local), attempt / f"r{rank}") for local, rank in enumerate(ranks)]
        present = [(before, after) for before, after in found if before.is_dir()]
        for before, after in present:
            before.rename(after)
        for _, after in present:  # when none has an old number any more
            after.rename(after.with_name(after.name.removeprefix("r")))


def merge_samples(directory: Path) -> None:
    """The samples of several nodes in one file in order of time, each line with its node."""
    lines: list[tuple[float, str]] = []
    parts = sorted(directory.glob(NODE_SAMPLES.format("*")))
    for part in parts:
        node = int(part.name.removeprefix("samples.node-").partition(".")[0])
        for line in read_lines(part):
            told = line if len(parts) == 1 else {"node": node, **line}
            lines.append((line["at_seconds"], json.dumps(told, separators=(",", ":"))))
    with (directory / SAMPLES_FILE).open("w") as merged:
        merged.writelines(f"{text}\n" for _, text in sorted(lines))


def merge_logs(directory: Path) -> None:
    """All ranks' output in one file, each line headed by its rank, and the launcher's last."""
    with (directory / LOG_FILE).open("w") as merged:
        logs = (directory / LOGS).glob("*/attempt_*/*/*.log")
        for log in sorted(logs, key=_by_rank):
            for line in log.read_text(errors="replace").splitlines():
                merged.write(f"[rank {log.parent.name} {log.stem}] {line}\n")
        for agent_log in sorted(directory.glob("agent*.log")):
            node = agent_log.stem.removeprefix("agent").replace(".node-", " of node ")
            for line in agent_log.read_text(errors="replace").splitlines():
                merged.write(f"[launcher{node}] {line}\n")


def _by_rank(log: Path) -> tuple[int, str, int]:
    """Rank, stream, and the attempt after how many restarts."""
    return int(log.parent.name), log.stem, int(log.parent.parent.name.removeprefix("attempt_"))


def clear(directory: Path) -> None:
    """Remove everything from a trial's folder but its own files."""
    for path in directory.iterdir():
        if path.name in KEPT:
            continue
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def empty(directory: Path) -> None:
    """Remove everything of an earlier attempt."""
    for path in directory.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
