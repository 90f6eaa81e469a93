"""Imports of the process that the zoo's ranks are forked from."""

import contextlib
import importlib
import os

from tests.zoo.forked import FRAMEWORKS_VARIABLE

for name in (
    "torch.distributed.fsdp",
    "shardmark.scripts.hooks",
    "shardmark.audit.replay",
    *os.environ.get(FRAMEWORKS_VARIABLE, "").split(),
):
    with contextlib.suppress(ImportError):
        importlib.import_module(name)
