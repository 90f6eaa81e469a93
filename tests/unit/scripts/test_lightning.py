"""Lightning trains on the ranks that there are, whatever `devices` says."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from shardmark.scripts.lightning import set_devices_of_lightning

CONNECTOR = "lightning_fabric.connector"


class _Connector:
    def __init__(self, *, devices: int) -> None:
        self.devices = devices


@pytest.mark.parametrize("imported_before", [True, False])
def test_devices_are_the_launchers_ranks(
    imported_before: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.syspath_prepend(tmp_path)
    if imported_before:
        kept = SimpleNamespace(_Connector=type("_Connector", (_Connector,), {}))
        monkeypatch.setitem(sys.modules, CONNECTOR, kept)
    else:
        package = tmp_path / "lightning_fabric"
        package.mkdir()
        (package / "__init__.py").touch()
        (package / "connector.py").write_text(
            "class _Connector:\n    def __init__(self, *, devices): self.devices = devices\n"
        )
        for name in ("lightning_fabric", CONNECTOR):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
            del sys.modules[name]
    set_devices_of_lightning()
    if imported_before:
        connector = sys.modules[CONNECTOR]
    else:
        from lightning_fabric import connector
    assert connector._Connector(devices=2).devices == 1
