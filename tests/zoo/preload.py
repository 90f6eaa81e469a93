"""Imports of the process that the zoo's ranks are forked from."""

import contextlib

import torch  # noqa: F401
import torch.distributed.fsdp

import shardmark.audit.hooks
import shardmark.audit.replay  # noqa: F401

for name in ("transformers.trainer", "accelerate", "lightning", "deepspeed"):
    with contextlib.suppress(ImportError):
        __import__(name)
