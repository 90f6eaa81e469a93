"""Collects what a trial's ranks left in its folder, and clears the rest away."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from shardmark.measure.rank_files import LOG_FILE, LOST_FILE, STEPS_FILE, rank_file, rank_steps_file
from shardmark.results.schema import RankRecord

AGENT_LOG = "agent.log"
LOGS = "logs"
KEPT = {STEPS_FILE, "samples.jsonl", LOG_FILE, "result.json"}


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


def merge_logs(directory: Path) -> None:
    """All ranks' output in one file, each line headed by its rank, and the launcher's last."""
    with (directory / LOG_FILE).open("w") as merged:
        logs = (directory / LOGS).glob("*/attempt_*/*/*.log")
        for log in sorted(logs, key=lambda path: (int(path.parent.name), path.stem)):
            for line in log.read_text(errors="replace").splitlines():
                merged.write(f"[rank {log.parent.name} {log.stem}] {line}\n")
        agent_log = directory / AGENT_LOG
        if agent_log.exists():
            for line in agent_log.read_text(errors="replace").splitlines():
                merged.write(f"[launcher] {line}\n")


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
