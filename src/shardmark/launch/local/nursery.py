"""A process that has imported the heavy libraries and touched no device: trials are forked from it.

It reads one JSON request a line from standard input and answers one a line on what was its
standard output.  When its standard input ends, whoever started it is gone: it ends its trial and
itself.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import selectors
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TextIO

from shardmark.core.environment_variables import DEVICE_TYPE_VARIABLE

Message = dict[str, Any]


class Nursery:
    """Loads, forks, reaps; one agent at a time."""

    def __init__(self, answers: TextIO, wake: int) -> None:
        self._answers = answers
        self._wake = wake
        self._agent: int | None = None

    def answer(self, message: Message) -> None:
        self._answers.write(json.dumps(message) + "\n")
        self._answers.flush()

    def handle(self, request: Message) -> None:
        if request["do"] == "load":
            self.answer(load(request["modules"], request["device_type"]))
        elif request["do"] == "machine":
            self.answer(in_child(lambda: machine_facts(request["device"])))
        elif request["do"] == "run":
            self._agent = self._fork_agent(**request)
            self.answer({"started": self._agent})

    def _fork_agent(
        self, *, directory: str, task: str, variables: dict[str, str], agent: str, **_: str
    ) -> int:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                os.environ.update(variables)
                code = importlib.import_module(agent).run_agent(directory, task)
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        return pid

    def reap(self) -> None:
        with suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid == self._agent:
                    self._agent = None
                    self.answer({"ended": pid, "exit_code": os.waitstatus_to_exitcode(status)})

    def end_agent(self) -> None:
        """Kill the trial under way, with every process of its session's group."""
        if self._agent is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._agent, signal.SIGKILL)


def load(modules: list[str], device_type: str) -> Message:
    """Import what ranks will import; what cannot be imported, the rank that needs it reports."""
    started = time.perf_counter()
    os.environ[DEVICE_TYPE_VARIABLE] = device_type
    errors = {}
    for name in modules:
        try:
            importlib.import_module(name)
        except Exception as error:
            errors[name] = f"{type(error).__name__}: {error}"
    # Children then neither copy nor search the libraries' own objects: DeepSpeed's start collects
    # garbage many times, at 0.3 s each over 2 million objects.
    gc.collect()
    gc.freeze()
    return {"loaded_seconds": time.perf_counter() - started, "errors": errors}


def machine_facts(device: str) -> Message:
    """What torch can use; called in a child, since asking CUDA spoils a process for forking."""
    import torch

    available = torch.cuda.is_available()
    if device == "cuda" and not available:
        return {"error": "torch finds no usable CUDA device"}
    device_type = "cuda" if available and device in ("auto", "cuda") else "cpu"
    count = torch.cuda.device_count() if device_type == "cuda" else 0
    return {
        "device_type": device_type,
        "device_count": count,
        "cores": len(os.sched_getaffinity(0)),
        "device_names": [torch.cuda.get_device_name(index) for index in range(count)],
    }


def in_child(work: Callable[[], Message]) -> Message:
    """The result of `work` from a forked child."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        with os.fdopen(writing, "w") as pipe:
            try:
                json.dump(work(), pipe)
            except Exception as error:
                json.dump({"error": f"{type(error).__name__}: {error}"}, pipe)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    os.waitpid(pid, 0)
    found: Message = json.loads(text) if text else {"error": "the process that asked CUDA died"}
    return found


def serve() -> None:
    """Handle requests until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.set_inheritable(answers.fileno(), False)
    os.dup2(2, 1)  # a library that prints must not spoil the answers
    wake_reading, wake_writing = os.pipe()
    os.set_blocking(wake_writing, False)
    os.set_blocking(wake_reading, False)
    signal.set_wakeup_fd(wake_writing)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the controller's to decide on
    nursery = Nursery(answers, wake_writing)
    with selectors.DefaultSelector() as selector:
        selector.register(0, selectors.EVENT_READ)
        selector.register(wake_reading, selectors.EVENT_READ)
        pending = b""
        while True:
            for key, _ in selector.select():
                if key.fd == wake_reading:
                    with suppress(BlockingIOError):
                        os.read(wake_reading, 4096)
                    nursery.reap()
                    continue
                chunk = os.read(0, 65536)
                if not chunk:
                    nursery.end_agent()
                    return
                *lines, pending = (pending + chunk).split(b"\n")
                for line in lines:
                    nursery.handle(json.loads(line))


if __name__ == "__main__":
    serve()
