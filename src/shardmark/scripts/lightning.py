"""Lets Lightning run on the ranks of a launcher."""

from __future__ import annotations

import os
import sys
from functools import partial
from typing import Any

from shardmark.scripts.bootstrap.sitecustomize import AfterImport
from shardmark.scripts.interventions.base import NAMES, replace


def set_devices_of_lightning() -> None:
    """Let Lightning use the launcher's ranks: it refuses another number than `devices`."""

    def create(original: Any, connector: Any, *args: Any, **kwargs: Any) -> None:
        if "LOCAL_WORLD_SIZE" in os.environ and "devices" in kwargs:
            kwargs["devices"] = int(os.environ["LOCAL_WORLD_SIZE"])
            if "LT_DEVICES" in os.environ:  # `fabric run` refuses two different numbers
                os.environ["LT_DEVICES"] = os.environ["LOCAL_WORLD_SIZE"]
        original(connector, *args, **kwargs)

    def watch(name: str, module: Any) -> None:
        replace(getattr(module, name), "__init__", create)

    calls = {m: partial(watch, n) for m, n in NAMES["classes_that_get_devices"].items()}
    for module in sys.modules.keys() & calls.keys():
        calls.pop(module)(sys.modules[module])
    sys.meta_path.insert(0, AfterImport({**calls}))
