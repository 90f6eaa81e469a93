"""Between an actor's nursery and its rank: one process that forks the rank and sees how it ends."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from datetime import timedelta
from pathlib import Path

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # in no __all__

from shardmark.launch.local import agent
from shardmark.launch.ray.agent_files import AGENT_LOG, OUTPUT, death_file

STORE_SECONDS = 60.0


def run_agent(directory: str, task: str) -> int:
    """Start the rank that the environment tells, wait for it, note how it ended.  0 if well.

    Runs in a process group of its own, so that the rank and what it has started can be ended by one
    signal.  The group's store lives here beside rank 0: it has to outlive a worker that others can
    do without.
    """
    if task == "judge":
        return agent.run_agent(directory, task)
    folder = Path(directory)
    _write_to(folder / AGENT_LOG, folder / AGENT_LOG)
    rank, local = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    print(f"guardian of rank {rank} started at {time.time():.3f}", flush=True)
    process = multiprocessing.get_context("fork").Process(target=_rank, args=(directory, task))
    process.start()
    try:
        store = _store() if rank == 0 else None
    except Exception:
        process.kill()
        raise
    process.join()
    del store
    code = process.exitcode
    assert code is not None, "it has been joined"
    if code != 0:
        noted = {"rank": rank, "exit_code": code, "at_seconds": time.time()}
        (folder / death_file(local)).write_text(json.dumps(noted))
    return int(code != 0)


def _store() -> TCPStore:
    """Where the ranks find each other; all of them are its clients."""
    return TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=STORE_SECONDS),
    )


def _rank(directory: str, task: str) -> None:
    output = Path(directory) / OUTPUT.format(os.environ["LOCAL_RANK"])
    output.mkdir(parents=True)
    _write_to(output / "stdout.log", output / "stderr.log")
    agent.rank_main(directory, task)


def _write_to(stdout: Path, stderr: Path) -> None:
    for descriptor, log in ((1, stdout), (2, stderr)):
        with log.open("ab") as file:
            os.dup2(file.fileno(), descriptor)
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
