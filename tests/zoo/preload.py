"""Imports of the process that the zoo's ranks are forked from."""

import contextlib
import importlib

for name in (
    "torch.distributed.fsdp",
    "shardmark.audit.hooks",
    "shardmark.audit.replay",
    "transformers.trainer",
    "accelerate",
    "lightning",
    "deepspeed",
):
    with contextlib.suppress(ImportError):
        importlib.import_module(name)
