"""`network.json`: absent, damaged, or from the future."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardmark.core.errors import InputError
from shardmark.results.network import NETWORK_FILE, read_network

EMPTY: dict[str, Any] = {
    "schema_version": 1,
    "measured_at_seconds": 0.0,
    "backend": "gloo",
    "device_type": "cpu",
    "hosts": ["a", "a"],
    "interface": None,
    "torch": "2.11",
    "operations": [],
}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "JSON"),
        (json.dumps(EMPTY | {"speed": 1}), "speed"),
        (json.dumps({key: EMPTY[key] for key in EMPTY if key != "hosts"}), "hosts"),
        (json.dumps(EMPTY | {"schema_version": 99}), "newer shardmark"),
        (None, "cannot be read"),  # a folder in its place
    ],
)
def test_what_cannot_be_read_is_named(content: str | None, message: str, tmp_path: Path) -> None:
    assert read_network(tmp_path) is None
    if content is None:
        (tmp_path / NETWORK_FILE).mkdir()
    else:
        (tmp_path / NETWORK_FILE).write_text(content)
    with pytest.raises(InputError, match=f"{NETWORK_FILE}.*{message}"):
        read_network(tmp_path)
