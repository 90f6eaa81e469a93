"""One rank's checkpoints on its node's disk: a folder for each, there whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardmark.strategies.base import CheckpointState
from shardmark.train.checkpoint_folder import check_writable, not_writable

STATE_FILE = "state.json"
ABSENT_FILE = "absent"
"""The rank died while the others trained on: its last checkpoint may be older than theirs."""
TENSORS = "tensors"
_PART = ".part"


def rank_folder(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}"


@dataclass(frozen=True, slots=True)
class CheckpointFiles:
    """`folder` is the node's; `leads` where this rank writes what all its ranks hold alike."""

    folder: Path
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
    def places(self) -> Path:
        """A line for each start of the training."""
        return self.own / "places.jsonl"

    def check(self) -> None:
        """Raise `InputError` where nothing can be written."""
        check_writable(self.own)

    def steps(self) -> list[int]:
        """Of all whole checkpoints, in order; one that shares needs the shared part as well."""
        found = {step: path / STATE_FILE for path, step in _generations(self.own)}
        shared = {step for _, step in _generations(self.shared)}
        return sorted(
            step
            for step, file in found.items()
            if step in shared or not json.loads(file.read_text())["shares"]
        )

    def save(self, step: int, kept: CheckpointState, state: Mapping[str, Any]) -> int:
        """Write a checkpoint, keep the one before and drop older ones; the bytes written."""
        newest = self.steps()[-1:]
        self.drop(lambda old: old not in newest)
        written = 0
        content = {"shares": bool(kept.shared), "counts": dict(kept.counts), **state}
        with _named(self.folder):
            if self.leads and kept.shared:
                written += _written(self.shared / f"step-{step}", kept.shared, {})
            return written + _written(self.own / f"step-{step}", kept.own, content)

    def load(self, step: int) -> tuple[CheckpointState, dict[str, Any]]:
        """The checkpoint of that step, on the CPU."""
        own = self.own / f"step-{step}"
        state: dict[str, Any] = json.loads((own / STATE_FILE).read_text())
        shared = _tensors(self.shared / f"step-{step}") if state.pop("shares") else {}
        return CheckpointState(own=_tensors(own), shared=shared, counts=state.pop("counts")), state

    def drop(self, unwanted: Callable[[int], bool]) -> None:
        """Remove the checkpoints whose step is unwanted, and unfinished ones."""
        for folder in (self.own, *([self.shared] if self.leads else [])):
            for path in folder.glob(f"step-*{_PART}"):
                shutil.rmtree(path)
            for path, step in _generations(folder):
                if unwanted(step):
                    shutil.rmtree(path)

    def append(self, file: Path, lines: Iterable[Mapping[str, Any]]) -> None:
        with _named(self.folder):
            self.own.mkdir(parents=True, exist_ok=True)
            with file.open("a") as opened:
                opened.writelines(json.dumps(line) + "\n" for line in lines)

    def lines(self, file: Path) -> list[dict[str, Any]]:
        """The objects of a file of lines; one that was cut short is left out."""
        if not file.exists():
            return []
        found = []
        for line in file.read_text().splitlines():
            try:
                found.append(json.loads(line))
            except ValueError:
                break
        return found

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


def _generations(folder: Path) -> Iterator[tuple[Path, int]]:
    for path in folder.glob("step-*"):
        number = path.name.removeprefix("step-")
        if number.isdecimal():
            yield path, int(number)


@contextmanager
def _named(folder: Path) -> Iterator[None]:
    """A disk that is full or read-only is the setting's matter: `InputError`.

    torch collects what went wrong in an exception that is no `Exception`.
    """
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except OSError as error:
        raise not_writable(folder, error) from error
    except CheckpointException as collected:
        cause = next(iter(collected.failures.values()))[0]
        raise not_writable(folder, cause) from cause


def _written(path: Path, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> int:
    """A finished checkpoint gets its name in one piece; the bytes of its files."""
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    part = path.with_suffix(_PART)
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    with _quietly():
        save(dict(tensors), storage_writer=FileSystemWriter(part / TENSORS), no_dist=True)
    with (part / STATE_FILE).open("w") as file:
        json.dump(state, file)
        file.flush()
        os.fsync(file.fileno())
    written = sum(file.stat().st_size for file in part.rglob("*") if file.is_file())
    shutil.rmtree(path, ignore_errors=True)
    part.rename(path)
    return written


def _tensors(path: Path) -> dict[str, Tensor]:
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    reader = FileSystemReader(path / TENSORS)
    found: dict[str, Tensor] = {}
    for name, metadata in reader.read_metadata().state_dict_metadata.items():
        assert isinstance(metadata, TensorStorageMetadata), "nothing but tensors is saved so"
        found[name] = torch.empty(metadata.size, dtype=metadata.properties.dtype)
    with _quietly():
        load(found, storage_reader=reader, no_dist=True)
    return found


def _quietly() -> warnings.catch_warnings:
    """torch warns that a rank saves by itself: that is what is wanted."""
    return warnings.catch_warnings(action="ignore", category=UserWarning)
