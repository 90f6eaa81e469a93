"""The engine for this machine: a nursery, forked agents, and the reaping of both."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from shardmark.errors import InputError, ShardmarkError
from shardmark.launch._engine import Task
from shardmark.launch.outcome import Ending, ProcessEnd, kernel_oom_kills
from shardmark.launch.tools import tool_path
from shardmark.strategies._protocol import Machine

TICK_SECONDS = 0.2
AGENT_FILE = "agent.json"
PRELOADED = (
    "torch",
    "torch._dynamo",
    "torch.distributed.launcher.api",
    "torch.distributed.tensor",
    "torch.profiler",
    "torch.utils.checkpoint",
    "torch.utils.flop_counter",
    "torchvision",
    "shardmark.launch.agent",
    "shardmark.training.rank",
)
"""What every rank imports, the parts that torch itself would import at a first step included."""

ENVIRONMENT = {
    "GLOO_SOCKET_IFNAME": "lo",  # else gloo asks for the host's name, which may not resolve
    "KINETO_LOG_LEVEL": "99",
    "TOKENIZERS_PARALLELISM": "false",
    "DS_SKIP_CUDA_CHECK": "1",
    "PYTHONUNBUFFERED": "1",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",  # importing the compiler must not start processes
}
"""Set for the ranks unless the user has set them."""


class LocalEngine:
    """Forks the ranks of each trial from one process that has loaded the libraries."""

    def __init__(self) -> None:
        self._nursery: subprocess.Popen[bytes] | None = None
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  (lives as long as the nursery)
        self._pending = b""

    def machine(self, device: str) -> Machine:
        self._start()
        answer = self._ask({"do": "machine", "device": device})
        if "error" in answer:
            raise InputError("device", str(answer["error"]), "set device: cpu, or see `doctor`")
        return Machine(
            device_type=answer["device_type"],
            device_count=answer["device_count"],
            cores=answer["cores"],
            device_names=tuple(answer["device_names"]),
        )

    def load(self, modules: Sequence[str], device_type: str) -> None:
        self._start()
        wanted = [*PRELOADED, *(name for name in modules if name not in PRELOADED)]
        answer = self._ask({"do": "load", "modules": wanted, "device_type": device_type})
        if "torch" in answer["errors"]:
            raise ShardmarkError(
                f"torch cannot be imported: {answer['errors']['torch']}; see `shardmark doctor`"
            )

    def run(
        self,
        directory: Path,
        *,
        trial_seconds: float,
        on_tick: Callable[[], None],
        task: Task = "measure",
    ) -> Ending:
        kills_before = kernel_oom_kills()
        started = time.monotonic()
        agent = self._start_agent(directory, task)
        how = "exited"
        exit_code = None
        try:
            while exit_code is None:
                if time.monotonic() - started > trial_seconds:
                    how = "timed_out"
                    self._show_stacks(directory)
                    exit_code = self._reap(agent)
                else:
                    answer = self._read(TICK_SECONDS)
                    exit_code = answer["exit_code"] if answer else None
                on_tick()
        except KeyboardInterrupt:
            how = "interrupted"
            exit_code = self._reap(agent)
        except BaseException:
            self._reap(agent)
            raise
        _end_group(agent)  # a rank may have left children of its own
        return Ending(
            how=how,  # type: ignore[arg-type]  # one of its three values
            agent_exit_code=exit_code,
            failures=_failures(directory / AGENT_FILE),
            oom_kills=kernel_oom_kills() - kills_before,
        )

    def close(self) -> None:
        if self._nursery is not None and self._nursery.stdin is not None:
            self._nursery.stdin.close()
            try:
                self._nursery.wait(timeout=5)
            except subprocess.TimeoutExpired:
                self._nursery.kill()
                self._nursery.wait()
            if self._nursery.stdout is not None:
                self._nursery.stdout.close()
            self._nursery = None
        self._log.close()

    def _start_agent(self, directory: Path, task: Task) -> int:
        """Its process id, which is that of its group, too."""
        try:
            return int(
                self._ask({"do": "run", "directory": str(directory), "task": task})["started"]
            )
        except KeyboardInterrupt:
            self.close()  # which ends what may have been started without our knowing
            raise

    def _start(self) -> None:
        if self._nursery is not None:
            return
        # The user's own model may live in the current folder.
        path = os.pathsep.join(filter(None, [str(Path.cwd()), os.environ.get("PYTHONPATH", "")]))
        self._nursery = subprocess.Popen(
            [sys.executable, "-m", "shardmark.launch.nursery"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**ENVIRONMENT, **os.environ, "PYTHONPATH": path, "PATH": tool_path()},
            start_new_session=True,  # the terminal's Ctrl-C reaches the controller alone
        )

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._nursery is not None, "started by machine() or load()"
        assert self._nursery.stdin is not None
        try:
            self._nursery.stdin.write(json.dumps(request).encode() + b"\n")
            self._nursery.stdin.flush()
        except BrokenPipeError:
            raise self._died() from None
        answer = self._read(None)
        assert answer is not None, "without a time limit there is an answer"
        return answer

    def _read(self, timeout_seconds: float | None) -> dict[str, Any] | None:
        """The nursery's next answer; None if none came in time."""
        assert self._nursery is not None
        assert self._nursery.stdout is not None
        descriptor = self._nursery.stdout.fileno()
        while b"\n" not in self._pending:
            ready, _, _ = select.select([descriptor], [], [], timeout_seconds)
            if not ready:
                return None
            chunk = os.read(descriptor, 65536)
            if not chunk:
                raise self._died()
            self._pending += chunk
        line, _, self._pending = self._pending.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _died(self) -> ShardmarkError:
        self._log.seek(0)
        tail = self._log.read().decode(errors="replace").splitlines()[-5:]
        return ShardmarkError(
            "the process that ranks are forked from has died: " + " | ".join(tail or ["no output"])
        )

    def _reap(self, agent: int) -> int | None:
        """End a trial's processes; the agent's exit code once the nursery has collected it."""
        _end_group(agent)
        answer = self._read(10)
        return answer["exit_code"] if answer else -signal.SIGKILL

    def _show_stacks(self, directory: Path) -> None:
        """Have each rank write to its log where it stands."""
        for file in directory.glob("rank-*.json"):
            with suppress(OSError, ValueError, KeyError):
                os.kill(json.loads(file.read_text())["pid"], signal.SIGUSR1)
        time.sleep(0.3)


def _end_group(agent: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(agent, signal.SIGKILL)


def _failures(file: Path) -> tuple[ProcessEnd, ...]:
    try:
        return tuple(ProcessEnd(**found) for found in json.loads(file.read_text()))
    except (OSError, ValueError):
        return ()
