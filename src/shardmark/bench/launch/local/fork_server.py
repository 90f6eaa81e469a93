"""A process that loads the libraries once, and from which the agent of every trial is forked.

The process that starts it imports no torch.  Each message is one packet, so that Ctrl-C cannot cut
it.  Decision 009 says why this is not `multiprocessing`'s forkserver.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import pickle
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, suppress
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from shardmark.base.errors import STORAGE_EXIT, InputError, ShardmarkError, error_kind
from shardmark.base.files.scratch import remove_abandoned_scratch, scratch_folder
from shardmark.base.machine import Machine
from shardmark.base.system.environment_variables import ALLOCATOR, DEVICE_TYPE_VARIABLE
from shardmark.base.system.processes import adopt_orphans, die_with_parent, end_descendants
from shardmark.bench.launch.started_command import StartedCommand
from shardmark.bench.launch.trial_artifacts import AGENT_LOG
from shardmark.ranks.measure.system.gpu_probe import cuda_libraries
from shardmark.ranks.measure.system.gpus import (
    BF16_CAPABILITY,
    KERNELS_REMEDY,
    await_memory,
    used_memory,
    without_kernels,
)
from shardmark.ranks.measure.system.machine_checks import AMD_REFUSED

if TYPE_CHECKING:
    from shardmark.bench.launch.engine import Task

AGENT = "shardmark.bench.launch.local.agent"
"""Module whose `run_agent` starts the ranks of a trial."""
TURNS = "shardmark.bench.launch.local.turns"
"""Module whose `run_agent` starts an agent for each of several trials."""

PRELOADED = (
    "torch",
    "torch._dynamo",
    "torch.distributed.tensor",
    "torch.profiler",
    "torch.utils.checkpoint",
    "torch.utils.flop_counter",
    "torchvision",
    AGENT,
    TURNS,
    "shardmark.bench.reference.capture",
    "shardmark.ranks.train.rank",
)
"""Modules that every rank imports, including those that torch imports in a first step."""

ENVIRONMENT = {
    "GLOO_SOCKET_IFNAME": "lo",  # otherwise gloo resolves the host name, which may fail
    "KINETO_LOG_LEVEL": "99",
    "TOKENIZERS_PARALLELISM": "false",
    "DS_SKIP_CUDA_CHECK": "1",
    "PYTHONUNBUFFERED": "1",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",  # importing the compiler must not start processes
    "TORCH_WARM_POOL": "0",  # nor using it on a CPU, where only Triton's kernels need them
    **ALLOCATOR,
}
"""Environment variables of the ranks; the user's settings take precedence."""

MESSAGE_BYTES = 2**17
REAP_SECONDS = 10.0
CLOSE_SECONDS = 5.0
END_SECONDS = 60.0
"""Greatest time that a killed process takes to release the memory of a large GPU."""
POLL_SECONDS = 0.02
STACK_SECONDS = 0.3
"""Time that ranks have to write their stacks."""


class ProcessDiedError(ShardmarkError):
    """The process that trials are forked from has died."""


class ForkServer:
    """Controls the fork server's process, which it starts on demand; runs one trial at a time.

    If the process dies, its trial fails, and the next trial gets a new process.
    """

    def __init__(self) -> None:
        self._process: StartedCommand | None = None
        self._channel: socket.socket | None = None
        self._agent_pid: int | None = None
        self._directory = Path()
        self._temporary = Path()
        """Folder for temporary files of the ranks, removed after each trial."""
        self._used_before: dict[str, int] = {}
        """Used bytes of each GPU before the trial."""
        self._scratch = ExitStack()
        self._to_load: tuple[list[str], str] | None = None
        self._loaded: tuple[list[str], str] | None = None
        """Modules and device type that the current process has loaded."""

    def machine(self, device: str) -> Machine:
        """Describe this machine for a `device` setting; raise `InputError` if there is none."""
        machine: Machine = self._ask("machine", device)
        return machine

    def load(self, modules: Sequence[str], device_type: str) -> None:
        """Import `PRELOADED` and these modules; raise `ShardmarkError` without torch."""
        self._to_load = [*dict.fromkeys((*PRELOADED, *modules))], device_type
        self.make_ready()

    def make_ready(self) -> None:
        """Start the process if it does not run, and load the requested modules in it."""
        if self._process is not None and self._process.failure() is not None:
            self.close()
        if self._channel is None:
            self._channel = self._start()
        if self._to_load != self._loaded and self._to_load is not None:
            self._ask("load", *self._to_load)
            self._loaded = self._to_load

    def begin(self, directory: Path, task: Task, variables: Mapping[str, str]) -> None:
        """Fork the agent of a trial, with additional environment variables."""
        self._begin(directory, AGENT, str(directory), task, variables)

    def begin_in_turns(self, directories: Sequence[Path]) -> None:
        """Fork an agent for each of several trials, which take turns."""
        self._begin(directories[0], TURNS, json.dumps([*map(str, directories)]), "measure", {})

    def _begin(
        self, directory: Path, agent: str, argument: str, task: Task, variables: Mapping[str, str]
    ) -> None:
        self._directory = directory
        try:
            self.make_ready()
            self._temporary.mkdir(parents=True, exist_ok=True)
            # Caches are empty for each trial, so that every trial compiles everything.
            caches = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
            added = {name: str(self._temporary / folder) for name, folder in caches.items()}
            added |= {"TMPDIR": str(self._temporary), **variables}
            on_gpu = self._to_load is not None and self._to_load[1] == "cuda"
            self._used_before = used_memory() if on_gpu else {}
            self._agent_pid = self._ask("fork", agent, argument, task, added)
        except ProcessDiedError as died:
            self._note(died)
        except KeyboardInterrupt:
            self.close()  # it also ends an agent whose process id has not arrived
            raise

    def ended(self, timeout_seconds: float) -> int | None:
        """Return the agent's exit code, or None if the trial has not ended within that time."""
        exit_code = -signal.SIGKILL  # the agent dies with the fork server
        try:
            if self._channel is not None:
                exit_code = int(self._receive(timeout_seconds))
        except TimeoutError:
            return None
        except ProcessDiedError as died:
            self._note(died)
        self._end_group()  # ranks may have left child processes
        self._agent_pid = None
        if exit_code != 0 and self._used_before:
            await_memory(self._used_before)
        shutil.rmtree(self._temporary, ignore_errors=True)
        remove_abandoned_scratch()  # what a script wrote
        return exit_code

    def show_stacks(self) -> None:
        """Make each rank of this machine write its stack to its log, wherever it waits."""
        with suppress(psutil.NoSuchProcess):  # the agent has ended
            for rank in psutil.Process(self._agent_pid).children():
                with suppress(psutil.NoSuchProcess):
                    rank.send_signal(signal.SIGUSR1)
        time.sleep(STACK_SECONDS)

    def reap(self) -> int:
        """Kill the trial's processes, and return the agent's exit code."""
        if self._agent_pid is None:
            return -signal.SIGKILL  # it has ended already
        self._end_group()
        exit_code = self.ended(REAP_SECONDS)
        if exit_code is None:
            self.close()  # a late answer would be taken for that of another trial
            return -signal.SIGKILL
        return exit_code

    def close(self) -> str | None:
        """End the process and its trial, and return how it ended.  A request starts a new one."""
        process, channel = self._process, self._channel
        if process is None or channel is None:
            self._scratch.close()  # the process may have failed to start
            return None
        self._process = self._channel = self._loaded = None
        channel.close()
        try:
            return process.close(CLOSE_SECONDS)
        finally:
            self._scratch.close()

    def _start(self) -> socket.socket:
        self._temporary = self._scratch.enter_context(scratch_folder()) / "trial"
        channel, server_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # A script's `sys.path` is passed on, because it may lead to the user's model.  The current
        # folder is not: a file in it could shadow a library.
        installed = (sys.prefix, sys.base_prefix)
        folders = [
            p for p in sys.path if not any(Path(p).is_relative_to(prefix) for prefix in installed)
        ]
        path = filter(None, [os.environ.get("PYTHONPATH", ""), *folders])
        variables = {"PYTHONPATH": os.pathsep.join(path)}
        if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:  # importing the compiler makes this folder
            variables["TORCHINDUCTOR_CACHE_DIR"] = str(self._temporary.with_name("compiler"))
        with server_end:
            self._process = StartedCommand(
                [sys.executable, "-P", "-m", __name__, str(server_end.fileno()), str(os.getpid())],
                option="engine",
                environment={**ENVIRONMENT, **os.environ, **variables},
                descriptors=[server_end.fileno()],
            )
        return channel

    def _ask(self, work: str, *arguments: Any) -> Any:
        if self._channel is None:
            self._channel = self._start()
        try:
            self._channel.send(pickle.dumps((work, arguments)))
        except BrokenPipeError:
            raise self._died() from None
        answer = self._receive(None)
        if isinstance(answer, ShardmarkError):
            raise answer
        return answer

    def _receive(self, timeout_seconds: float | None) -> Any:
        """Return the next answer; raise `TimeoutError` if none comes in time."""
        assert self._channel is not None, "a request was sent"
        self._channel.settimeout(timeout_seconds)
        try:
            packet = self._channel.recv(MESSAGE_BYTES)
        except ConnectionResetError:
            packet = b""
        if not packet:
            raise self._died()
        return pickle.loads(packet)  # no other process can write to an unnamed socket pair

    def _died(self) -> ProcessDiedError:
        return ProcessDiedError(f"the process that ranks are forked from has died: {self.close()}")

    def _note(self, died: ProcessDiedError) -> None:
        """Write the error into the trial's log."""
        with (self._directory / AGENT_LOG).open("a") as log:
            print(died, file=log)

    def _end_group(self) -> None:
        """Kill the trial's processes, and wait until all have ended."""
        if self._agent_pid is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._agent_pid, signal.SIGKILL)
                await_end(self._agent_pid)


class _Server:
    """The fork server's process.  It ends with its owner, and ends its trial before."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._agent_pid = 0
        self._waiting: threading.Thread | None = None

    def serve(self) -> None:
        adopt_orphans()
        try:
            while request := self._channel.recv(MESSAGE_BYTES):
                work, arguments = pickle.loads(request)
                try:
                    answer = getattr(self, work)(*arguments)
                except ShardmarkError as error:
                    answer = error
                self._channel.send(pickle.dumps(answer))
                if work == "fork":
                    self._waiting = threading.Thread(target=self._wait, daemon=True)
                    self._waiting.start()
        except ConnectionError:
            pass  # the owner ended before it received an answer
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the owner's death is signalled twice
            if self._waiting is not None and self._waiting.is_alive():
                os.killpg(self._agent_pid, signal.SIGKILL)
                await_end(self._agent_pid)
            end_descendants()
            with suppress(ShardmarkError):  # those of a killed owner: no later command may run here
                remove_abandoned_scratch()

    def machine(self, device: str) -> Machine:
        """Describe torch's devices.  A child asks, because CUDA breaks later forks."""
        try:
            importlib.import_module("torch")
            with ProcessPoolExecutor(
                1, get_context("fork"), initializer=die_with_parent, initargs=(os.getpid(),)
            ) as child:
                return child.submit(_machine, device).result()
        except Exception as error:  # importing torch and asking CUDA may raise anything
            raise InputError(
                "device", _describe(error), "set device: cpu, or see `doctor`"
            ) from None

    def load(self, modules: list[str], device_type: str) -> None:
        """Import modules for the ranks; a rank that needs a module reports a failed import."""
        os.environ[DEVICE_TYPE_VARIABLE] = device_type
        for name in modules:
            try:
                importlib.import_module(name)
            except Exception as error:
                if name == "torch":
                    reason = f"torch cannot be imported: {_describe(error)}"
                    raise ShardmarkError(f"{reason}; see `shardmark doctor`") from None
        # Children then neither copy nor collect the libraries' objects.  DeepSpeed's start collects
        # garbage many times, which takes 0.3 s each for 2 million objects.
        gc.collect()
        gc.freeze()

    def fork(self, agent: str, argument: str, task: str, variables: dict[str, str]) -> int:
        """Fork the agent of a trial in a new process group, which one signal can end."""
        if self._waiting is not None:
            self._waiting.join()  # the trial is over; a fork needs a single thread
        server_pid = os.getpid()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.setpgid(0, 0)
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                die_with_parent(server_pid)
                self._channel.close()
                os.environ.update(variables)
                tempfile.tempdir = None  # TMPDIR has changed
                code = importlib.import_module(agent).run_agent(argument, task)
            except BaseException as error:
                if error_kind(error) == "storage":
                    code = STORAGE_EXIT
                with suppress(OSError):  # a disk may be full
                    traceback.print_exc()  # into the trial's log: `os._exit` prints nothing
            finally:
                with suppress(OSError):
                    sys.stdout.flush()
                os._exit(code)
        # The child does the same; either may be first.
        with suppress(PermissionError, ProcessLookupError):
            os.setpgid(pid, pid)
        self._agent_pid = pid
        return pid

    def _wait(self) -> None:
        _, status = os.waitpid(self._agent_pid, 0)
        end_descendants()  # ranks may have left processes in other sessions
        with suppress(OSError):  # the owner has ended
            self._channel.send(pickle.dumps(os.waitstatus_to_exitcode(status)))


def _describe(error: Exception) -> str:
    if isinstance(error, ShardmarkError):
        return str(error)
    return f"{type(error).__name__}: {error}"


def _machine(device: str) -> Machine:
    import torch

    available = device != "cpu" and torch.cuda.is_available()
    if available and torch.version.hip is not None:
        raise ShardmarkError(AMD_REFUSED)
    if device == "cuda" and not available:
        raise ShardmarkError("torch finds no usable CUDA device")
    count = torch.cuda.device_count() if available else 0
    names = tuple(torch.cuda.get_device_name(index) for index in range(count))
    capabilities = [torch.cuda.get_device_capability(index) for index in range(count)]
    for name, capability in zip(names, capabilities, strict=True):
        if reason := without_kernels(name, capability, torch.cuda.get_arch_list()):
            raise ShardmarkError(f"{reason}; {KERNELS_REMEDY}")
    return Machine(
        device_type="cuda" if count else "cpu",
        device_count=count,
        cores=len(os.sched_getaffinity(0)),
        device_names=names,
        has_bf16=all(capability >= BF16_CAPABILITY for capability in capabilities),
        libraries=cuda_libraries() if count else (),
    )


def await_end(group: int, *, proc: Path = Path("/proc")) -> None:
    """Wait until no process of the group lives, because living processes hold memory, also of GPUs.

    A zombie holds no memory.
    """
    deadline = time.monotonic() + END_SECONDS
    while living(group, proc) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)


def living(group: int, proc: Path) -> list[int]:
    """Return the process ids of the group, without zombies."""
    pids = []
    for file in proc.glob("[0-9]*/stat"):
        with suppress(OSError):
            # The name before the last bracket may contain any character, brackets included.
            state, _, process_group = file.read_text().rpartition(")")[2].split()[:3]
            if int(process_group) == group and state not in "ZX":
                pids.append(int(file.parent.name))
    return pids


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the controller handles Ctrl-C
    # SIGTERM also ends the process while it loads libraries and does not read its channel.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    die_with_parent(int(sys.argv[2]), signal.SIGTERM)
    with socket.socket(fileno=int(sys.argv[1])) as channel:
        _Server(channel).serve()
