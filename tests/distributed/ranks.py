"""Starts real gloo groups for the tests and collects what each rank returns."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import time
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import (
    ProcessException,
    ProcessExitedException,
    start_processes,
)

from shardmark.base.system.environment_variables import DEVICE_TYPE_VARIABLE
from shardmark.bench.launch.local.fork_server import ENVIRONMENT
from shardmark.ranks.strategies.base import RankContext
from tests import ROOT
from tests.crashes import CRASHES

JOIN_SECONDS = 350
STDERR = 2
NATIVE_CRASHES = {"SIGSEGV", "SIGBUS", "SIGABRT", "SIGFPE", "SIGILL"}
"""A library's: nothing here is compiled.  No rank of a test sends them to itself."""


def run_ranks(
    work: Callable[..., Any],
    *arguments: Any,
    world_size: int,
    directory: Path,
    device_type: str = "cpu",
    join_seconds: float = JOIN_SECONDS,
) -> list[Any]:
    """Run `work(process, *arguments)` in each rank of a group; return the results in rank order.

    The group meets at a file, since a port could be taken; ranks that hang are ended.  Over gloo,
    and with CUDA devices over NCCL as well.  A group of which a library crashes is run once more,
    and the run of all tests ends with the stack.
    """
    group = partial(_run, work, arguments, world_size, device_type, join_seconds)
    try:
        return group(directory)
    except ProcessExitedException as crash:
        if crash.signal_name not in NATIVE_CRASHES:
            raise
        CRASHES.append(f"{crash}\n{_logs(directory)}")
    again = directory / "again"
    again.mkdir()
    return group(again)


def _run(  # noqa: PLR0917  (its caller gives them once, for two runs)
    work: Callable[..., Any],
    arguments: Any,
    world_size: int,
    device_type: str,
    join_seconds: float,
    directory: Path,
) -> list[Any]:
    on_cpu = device_type == "cpu"
    if on_cpu:
        _start_server()
    context = start_processes(  # type: ignore[no-untyped-call]
        _enter,
        (work, arguments, world_size, str(directory), device_type, join_seconds, dict(os.environ)),
        nprocs=world_size,
        join=False,
        start_method="forkserver" if on_cpu else "spawn",
    )
    deadline = time.monotonic() + join_seconds
    try:
        while not context.join(timeout=1):  # returns whenever one of them ends
            if time.monotonic() > deadline:
                raise TimeoutError(f"ranks were not done after {join_seconds:g} s")
    except (ProcessException, TimeoutError):
        print(_logs(directory))
        raise
    finally:
        for process in context.processes:
            if process.is_alive():
                process.kill()
                process.join()
    # What this process's own ranks pickled a moment ago.
    return [pickle.loads((directory / f"{r}.pickle").read_bytes()) for r in range(world_size)]


def _logs(directory: Path) -> str:
    return "\n".join(
        f"{path.name}\n{path.read_text(errors='replace')}"
        for path in sorted(directory.glob("*.log"))
    )


def _start_server() -> None:
    """The process that ranks are forked from loads the libraries once for all groups."""
    multiprocessing.set_forkserver_preload(["tests.distributed.preloaded"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
        patch.setenv(DEVICE_TYPE_VARIABLE, "cpu")
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, os.environ.get(name, value))
        forkserver.ensure_running()


def _enter(  # noqa: PLR0917  (torch gives them by position)
    rank: int,
    work: Callable[..., Any],
    arguments: Any,
    world_size: int,
    directory: str,
    device_type: str,
    join_seconds: float,
    environment: Mapping[str, str],
) -> None:
    os.environ.update(environment)
    os.environ.update(
        {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            "GLOO_SOCKET_IFNAME": "lo",
            DEVICE_TYPE_VARIABLE: device_type,
        }
    )
    torch.set_num_threads(1)
    folder = Path(directory)
    log = os.open(folder / f"{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, STDERR)  # pytest has long forgotten the one that this process was forked with
    faulthandler.enable()
    faulthandler.dump_traceback_later(join_seconds - 10)
    store = dist.FileStore(str(folder / "store"), world_size)  # type: ignore[attr-defined]
    device = None if device_type == "cpu" else torch.device(device_type, rank)
    if device is not None:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "gloo" if device is None else "cpu:gloo,cuda:nccl",
        store=store,
        rank=rank,
        world_size=world_size,
        device_id=device,
    )
    process = RankContext(
        rank=rank,
        world_size=world_size,
        local_rank=rank,
        local_world_size=world_size,
        device=device or torch.device("cpu"),
    )
    try:
        found = work(process, *arguments)
    except Exception:
        traceback.print_exc()  # torch tells that of one rank alone, not always of the first
        raise
    (folder / f"{rank}.pickle").write_bytes(pickle.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
