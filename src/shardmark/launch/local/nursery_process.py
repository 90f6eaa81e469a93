"""The nursery as its owner sees it: a child process that answers requests and forks trials."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from shardmark.core.errors import InputError, ShardmarkError
from shardmark.core.machine import Machine
from shardmark.core.tools import tool_path
from shardmark.launch.engine import Task
from shardmark.launch.outcome import ProcessEnd

AGENT = "shardmark.launch.local.agent"
"""Between the nursery and the ranks: the module whose `run_agent` starts them."""

AGENT_FILE = "agent.json"
PRELOADED = (
    "torch",
    "torch._dynamo",
    "torch.distributed.elastic.agent.server",
    "torch.distributed.tensor",
    "torch.profiler",
    "torch.utils.checkpoint",
    "torch.utils.flop_counter",
    "torchvision",
    "shardmark.launch.local.agent",
    "shardmark.equivalence.rank",
    "shardmark.train.links",
    "shardmark.train.rank",
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


class NurseryProcess:
    """Starts the nursery when first asked; forks one trial at a time from it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  (lives as long as the nursery)
        self._pending = b""
        self._agent: int | None = None

    def machine(self, device: str) -> Machine:
        """What `device` means on this machine.  `InputError` if it cannot be had."""
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
        """Import what every rank needs, and these; `ShardmarkError` where torch cannot be had."""
        wanted = [*PRELOADED, *(name for name in modules if name not in PRELOADED)]
        answer = self._ask({"do": "load", "modules": wanted, "device_type": device_type})
        if "torch" in answer["errors"]:
            raise ShardmarkError(
                f"torch cannot be imported: {answer['errors']['torch']}; see `shardmark doctor`"
            )

    def begin(
        self, directory: Path, task: Task, variables: Mapping[str, str], *, agent: str = AGENT
    ) -> None:
        """Fork the agent of a trial, with these environment variables on top."""
        request = {"do": "run", "directory": str(directory), "task": task, "agent": agent}
        try:
            self._agent = int(self._ask({**request, "variables": dict(variables)})["started"])
        except KeyboardInterrupt:
            self.close()  # which ends what may have been started without our knowing
            raise

    def ended(self, timeout_seconds: float) -> int | None:
        """The trial's exit code; None if it has not ended within that time."""
        answer = self._read(timeout_seconds)
        if answer is None:
            return None
        self._end_group()  # a rank may have left children of its own
        return int(answer["exit_code"])

    def reap(self) -> int:
        """End the trial's processes; the agent's exit code once the nursery has collected it."""
        self._end_group()
        answer = self._read(10)
        return int(answer["exit_code"]) if answer else -signal.SIGKILL

    def close(self) -> None:
        """End the nursery, and with it whatever runs."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            try:
                self._process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            if self._process.stdout is not None:
                self._process.stdout.close()
            self._process = None
        self._log.close()

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            # The user's own model may live in the current folder.
            path = filter(None, [str(Path.cwd()), os.environ.get("PYTHONPATH", "")])
            variables = {"PYTHONPATH": os.pathsep.join(path), "PATH": tool_path()}
            self._process = subprocess.Popen(
                [sys.executable, "-m", "shardmark.launch.local.nursery"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                env={**ENVIRONMENT, **os.environ, **variables},
                start_new_session=True,  # the terminal's Ctrl-C reaches the controller alone
            )
        return self._process

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        stdin = self._started().stdin
        assert stdin is not None
        try:
            stdin.write(json.dumps(request).encode() + b"\n")
            stdin.flush()
        except BrokenPipeError:
            raise self._died() from None
        answer = self._read(None)
        assert answer is not None, "without a time limit there is an answer"
        return answer

    def _read(self, timeout_seconds: float | None) -> dict[str, Any] | None:
        """The nursery's next answer; None if none came in time."""
        stdout = self._started().stdout
        assert stdout is not None
        descriptor = stdout.fileno()
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

    def _end_group(self) -> None:
        if self._agent is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._agent, signal.SIGKILL)


def show_stacks(directory: Path) -> None:
    """Have each rank of this machine write to its log where it stands."""
    for file in directory.glob("rank-*.json"):
        with suppress(OSError, ValueError, KeyError):
            os.kill(json.loads(file.read_text())["pid"], signal.SIGUSR1)
    time.sleep(0.3)


def process_ends(directory: Path) -> tuple[ProcessEnd, ...]:
    """How ranks ended badly, as their agent saw it."""
    try:
        found = json.loads((directory / AGENT_FILE).read_text())
        return tuple(ProcessEnd(**end) for end in found)
    except (OSError, ValueError):
        return ()
