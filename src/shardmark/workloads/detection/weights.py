"""Trained weights for detectors: which files they are, where they lie, how heads are fitted.

Imports torch only where tensors are touched.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from http.client import HTTPException
from importlib.util import find_spec
from pathlib import Path

from shardmark.core.errors import DataError

_CLASS = re.compile(r"^class (\w+)_Weights\(WeightsEnum\):\n((?:    .*\n|\n)+)", re.MULTILINE)
_ENTRY = re.compile(r"^    (\w+) = Weights\(\s*\n\s*url=\"([^\"]+)\"", re.MULTILINE)

BACKBONES = {
    "resnet50": "resnet50",
    "resnet18": "resnet18",
    "mobilenet_v3_large": "mobilenet_v3_large",
    "swin_t": "swin_t",
}
"""Part of a detector's name -> the classification model that its backbone is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsFile:
    """One file of torchvision's."""

    address: str
    """Where torchvision fetches it from."""

    @property
    def path(self) -> Path:
        """Where torch keeps it (`torch.hub.get_dir`)."""
        cache_folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
        home = Path(os.environ.get("TORCH_HOME") or cache_folder / "torch").expanduser()
        return home / "hub" / "checkpoints" / self.address.rpartition("/")[2]


def coco_weights(detector: str) -> WeightsFile | None:
    """torchvision's first COCO weights of the detector; None if there are none."""
    return _published("models/detection", detector, "COCO")


def imagenet_weights(detector: str) -> WeightsFile | None:
    """torchvision's first ImageNet weights of the detector's backbone; None if there are none."""
    backbone = next((model for part, model in BACKBONES.items() if part in detector), None)
    return None if backbone is None else _published("models", backbone, "IMAGENET1K")


PUBLISHED: dict[str, Callable[[str], WeightsFile | None]] = {
    "coco": coco_weights,
    "imagenet": imagenet_weights,
}
"""Value of `workload.weights` -> the detector's file."""


def ensure(file: WeightsFile, *, download: bool) -> None:
    """Raise `DataError` that says which file to place where, unless it is there or can be had."""
    if file.path.is_file():
        return
    remedy = f"place {file.address} at {file.path}, or name a file of yours in workload.weights"
    if not download:
        raise DataError(
            str(file.path),
            "is missing, and workload.download is false",
            f"set it to true, {remedy}",
        )
    try:
        _fetch(file)
    except (OSError, HTTPException, ValueError) as error:
        raise DataError(
            str(file.path), f"is missing and could not be fetched ({error})", remedy
        ) from error


def _fetch(file: WeightsFile) -> None:
    file.path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=file.path.parent, delete=False) as partial:
        try:
            with urllib.request.urlopen(file.address, timeout=60) as answer:
                shutil.copyfileobj(answer, partial)
            partial.close()
            _check_hash(file, Path(partial.name))
            Path(partial.name).rename(file.path)
        finally:
            Path(partial.name).unlink(missing_ok=True)


def _check_hash(file: WeightsFile, found: Path) -> None:
    """torch names such files NAME-HASH.pth, with the first digits of the SHA-256."""
    with found.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    wanted = file.path.stem.rpartition("-")[2]
    if not digest.startswith(wanted):
        raise ValueError(f"its SHA-256 begins {digest[:8]}, not {wanted}")


def _published(folder: str, model: str, start: str) -> WeightsFile | None:
    """The first entry of the model's weights whose name starts so."""
    for entry, address in _addresses(folder).get(model.replace("_", ""), ()):
        if entry.startswith(start):
            return WeightsFile(address=address)
    return None


@cache
def _addresses(folder: str) -> dict[str, list[tuple[str, str]]]:
    """Model, without underscores -> (entry, address) of its weights.

    Read from torchvision's source, which is not imported.
    """
    spec = find_spec("torchvision")
    assert spec is not None, "torchvision is a dependency"
    assert spec.origin is not None
    found: dict[str, list[tuple[str, str]]] = {}
    for path in sorted((Path(spec.origin).parent / folder).glob("[!_]*.py")):
        for name, body in _CLASS.findall(path.read_text(encoding="utf-8")):
            entries = found.setdefault(name.lower().replace("_", ""), [])
            entries += _ENTRY.findall(body)
    return found
