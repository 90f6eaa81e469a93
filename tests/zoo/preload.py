"""Imports of the process that the zoo's ranks are forked from."""

import contextlib
import gc
import importlib
import os

from shardmark.bench.launch.local.fork_server import ENVIRONMENT
from tests.zoo.forked import FRAMEWORKS_VARIABLE

os.environ.update(ENVIRONMENT)  # importing torch's compiler must not start processes
os.environ["TORCHDYNAMO_DISABLE"] = "1"  # as in the starts of an audit
for name in (
    "torch._dynamo",  # torch's optimizers import it
    "torch.distributed.fsdp",
    "shardmark.scripts.hooks",
    "shardmark.audit.replay",
    *os.environ.get(FRAMEWORKS_VARIABLE, "").split(),
):
    with contextlib.suppress(ImportError):
        importlib.import_module(name)
gc.collect()
gc.freeze()
