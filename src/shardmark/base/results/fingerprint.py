"""Fingerprint of a run's code, data, models and versions, stored as `fingerprint.json`.

A run folder never has trials of different fingerprints.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal, TypeVar

from pydantic import Field

from shardmark.base.files.stored import Stored

FINGERPRINT_FILE = "fingerprint.json"
Part = TypeVar("Part")


class SourceRecord(Stored):
    """A module of the user's code."""

    file: str
    sha256: str


class DataRecord(Stored):
    """A file that training reads, or a folder of them."""

    files: int
    index_sha256: str
    """Hash of the names, sizes and modification times of the files."""


class ModelRecord(Stored):
    """A model that the ranks built."""

    parameters: int
    structure_sha256: str


class Fingerprint(Stored):
    """Records of the code, data, models and versions that a run used."""

    schema_version: Literal[1] = 1
    versions: dict[str, str] = Field(default_factory=dict)
    """Versions of packages, the driver and devices, by name."""
    sources: dict[str, SourceRecord] = Field(default_factory=dict)
    """Records of the user's code, by module."""
    data: dict[str, DataRecord] = Field(default_factory=dict)
    """Records of data, by the path in the experiment."""
    corpora: dict[str, str] = Field(default_factory=dict)
    """SHA-256 of the installed text corpora, by name."""
    models: dict[str, ModelRecord] = Field(default_factory=dict)
    """Records of models, by a hash of the workload's options."""

    def changes(self, now: Fingerprint) -> Iterator[str]:
        """Describe the parts that both fingerprints have and that differ."""
        for _, was, source in _differing(self.sources, now.sources):
            if was.sha256 != source.sha256:
                yield f"the source of {source.file}"
        for path, before, data in _differing(self.data, now.data):
            counts = f"{before.files} files, now {data.files}"
            same = before.files == data.files
            yield f"{path} ({'names, sizes or times of its files' if same else counts})"
        for name, *_ in _differing(self.corpora, now.corpora):
            yield f"the text of {name}, which comes with the installation"
        for name, old, new in _differing(self.versions, now.versions):
            yield f"{name} ({old}, now {new})"
        for _, built, model in _differing(self.models, now.models):
            counts = f"{built.parameters:,} parameters, now {model.parameters:,}"
            yield f"the model ({'its layers' if built.parameters == model.parameters else counts})"

    def added(self, now: Fingerprint) -> Iterator[str]:
        """Describe code and data that only the other fingerprint has."""
        for module in now.sources.keys() - self.sources.keys():
            yield f"the source of {now.sources[module].file}"
        yield from now.data.keys() - self.data.keys()

    def user_content(self) -> Fingerprint:
        """Return a fingerprint of the user's code and data alone."""
        return Fingerprint(sources=self.sources, data=self.data)

    def merged(self, now: Fingerprint) -> Fingerprint:
        """Return a copy with the parts of another fingerprint, which take precedence."""
        parts = ("versions", "sources", "data", "corpora", "models")
        return self.model_copy(
            update={part: getattr(self, part) | getattr(now, part) for part in parts}
        )


def _differing(
    before: Mapping[str, Part], now: Mapping[str, Part]
) -> Iterator[tuple[str, Part, Part]]:
    for key in before.keys() & now.keys():
        if before[key] != now[key]:
            yield key, before[key], now[key]
