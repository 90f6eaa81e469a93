"""Imports of the ranks, loaded once by the process that they are forked from."""

from __future__ import annotations

import gc
import importlib

from shardmark.bench.launch.local.fork_server import PRELOADED

for name in (*PRELOADED, "shardmark.ranks.strategies.deepspeed.preload"):
    importlib.import_module(name)

# As in the package's own fork server: DeepSpeed's start collects garbage many times.
gc.collect()
gc.freeze()
