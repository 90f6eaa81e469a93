"""Errors of a disk have a remedy; errors of a socket are none of a disk's."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

import pytest

from shardmark.base.errors import FULL, StorageError
from shardmark.base.files.storage import storing, temporary_folder


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.ESTALE, "see to that disk"),
        (errno.ENODEV, "see to that disk"),
        (errno.ENOTCONN, "see to that disk"),
        (errno.ETIMEDOUT, "see to that disk"),
        (errno.ENOENT, "run the same command again"),
        (errno.EACCES, "get the right"),
    ],
)
def test_disk_errors_name_a_remedy(tmp_path: Path, number: int, remedy: str) -> None:
    error = OSError(number, os.strerror(number), str(tmp_path / "trials"))
    with pytest.raises(StorageError, match=remedy), storing(tmp_path):
        raise error
    if number not in FULL:
        with pytest.raises(type(error)), storing(tmp_path / "elsewhere"):
            raise error


def test_missing_temporary_folder_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(tempfile, "gettempdir", none)
    with pytest.raises(StorageError, match=r"TMPDIR: No usable .*; make room there"):
        temporary_folder()
