"""Importing this brings DeepSpeed into a process as its ranks will need it."""

from __future__ import annotations

import importlib
import logging
import os

from shardmark.base.system.environment_variables import DEVICE_TYPE_VARIABLE

if DEVICE_TYPE_VARIABLE in os.environ:
    # Else DeepSpeed looks which accelerator there is: it would take one where the experiment says
    # `device: cpu`, and a process that has asked the CUDA runtime cannot fork ranks that use it.
    os.environ.setdefault("DS_ACCELERATOR", os.environ[DEVICE_TYPE_VARIABLE])

import deepspeed.ops

logger = logging.getLogger(__name__)

if os.environ.get(DEVICE_TYPE_VARIABLE) != "cuda":  # on GPUs, this table asks the CUDA runtime
    # It serves inference alone, on the CPU, and would be compiled at the first start (20 to 90 s).
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

try:
    # Stage 1 to 3 import this when they check the optimizer, and it imports torch's compiler: 8 s.
    importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")
except ImportError:
    logger.info("this DeepSpeed has no Muon optimizer to load beforehand")
