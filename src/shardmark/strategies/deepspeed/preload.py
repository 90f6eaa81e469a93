"""Importing this brings DeepSpeed into a process as its ranks will need it, compiled parts too."""

from __future__ import annotations

import importlib
import logging
import os

from shardmark.core.environment_variables import DEVICE_TYPE_VARIABLE

if os.environ.get(DEVICE_TYPE_VARIABLE) == "cpu":
    # Else DeepSpeed takes the machine's accelerator, even where the experiment says `device: cpu`.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed  # noqa: F401  (loaded for the processes forked from this one)
from deepspeed.accelerator import get_accelerator

logger = logging.getLogger(__name__)

if get_accelerator().device_name() == "cpu":
    # Compiled once a machine (20 to 60 s), loaded once a fork server.
    operator = get_accelerator().create_op_builder("ShareMemCommBuilder")
    if operator is not None:
        operator.load()

try:
    # Stage 1 to 3 import this when they check the optimizer, and it imports torch's compiler: 8 s.
    importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")
except ImportError:
    logger.info("this DeepSpeed has no Muon optimizer to load beforehand")
