"""What a run trained, as content: `fingerprint.json`.  Trials of different ones are never mixed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from pydantic import Field

from shardmark.results.files import read_model, write_model
from shardmark.results.schema import Stored

FINGERPRINT_FILE = "fingerprint.json"


class SourceRecord(Stored):
    """One module of the user's."""

    file: str
    sha256: str


class DataRecord(Stored):
    """A file that training reads, or a folder of them."""

    files: int
    index_sha256: str
    """Of the names, sizes and times of the files."""


class ModelRecord(Stored):
    """A model as the ranks built it."""

    parameters: int
    structure_sha256: str


class Fingerprint(Stored):
    """Each part by name; what is not in it, the run has not used."""

    schema_version: Literal[1] = 1
    versions: dict[str, str] = Field(default_factory=dict)
    """Packages, driver and devices."""
    sources: dict[str, SourceRecord] = Field(default_factory=dict)
    """By module."""
    data: dict[str, DataRecord] = Field(default_factory=dict)
    """By path, as the experiment names it."""
    corpora: dict[str, str] = Field(default_factory=dict)
    """SHA-256 of the text that comes with the installation, by name."""
    models: dict[str, ModelRecord] = Field(default_factory=dict)
    """By hash of the workload's options."""

    def changes(self, now: Fingerprint) -> Iterator[str]:
        """What both have and is not the same, in words."""
        for module in self.sources.keys() & now.sources.keys():
            if self.sources[module].sha256 != now.sources[module].sha256:
                yield f"the source of {now.sources[module].file}"
        for path in self.data.keys() & now.data.keys():
            before, after = self.data[path], now.data[path]
            if before.files != after.files:
                yield f"{path} ({before.files} files, now {after.files})"
            elif before != after:
                yield f"{path} (names, sizes or times of its files)"
        for name in self.corpora.keys() & now.corpora.keys():
            if self.corpora[name] != now.corpora[name]:
                yield f"the text of {name}, which comes with the installation"
        for name in self.versions.keys() & now.versions.keys():
            if self.versions[name] != now.versions[name]:
                yield f"{name} ({self.versions[name]}, now {now.versions[name]})"
        for key in self.models.keys() & now.models.keys():
            counts = self.models[key].parameters, now.models[key].parameters
            if self.models[key] != now.models[key]:
                same = counts[0] == counts[1]
                how = "its layers" if same else f"{counts[0]:,} parameters, now {counts[1]:,}"
                yield f"the model ({how})"

    def merged(self, now: Fingerprint) -> Fingerprint:
        """With what is known now."""
        parts = ("versions", "sources", "data", "corpora", "models")
        return self.model_copy(
            update={part: getattr(self, part) | getattr(now, part) for part in parts}
        )


def write_fingerprint(folder: Path, fingerprint: Fingerprint) -> None:
    write_model(folder / FINGERPRINT_FILE, fingerprint)


def read_fingerprint(folder: Path) -> Fingerprint | None:
    """The stored one; None where there is none.  Raises as `read_model` does."""
    try:
        return read_model(Fingerprint, folder / FINGERPRINT_FILE)
    except FileNotFoundError:
        return None
