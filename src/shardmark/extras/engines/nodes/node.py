"""The process of one node: forks ranks, samples them, and sends their files.

It imports no torch.  It executes the controller's requests until the run is over or the connection
ends.
"""

from __future__ import annotations

import json
import os
import platform
import queue
import select
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict
from io import BytesIO
from pathlib import Path
from typing import IO

from shardmark.base.errors import InputError, ShardmarkError, StorageError
from shardmark.base.files.run_files import TRIAL_FILE
from shardmark.base.files.scratch import scratch_folder
from shardmark.base.files.storage import REMEDIES
from shardmark.base.results.verification import CELLS_FILE
from shardmark.base.system.environment_variables import RENDEZVOUS_VARIABLE, SECRET_VARIABLE
from shardmark.base.text import say
from shardmark.bench.launch.engine import Task, library_versions
from shardmark.bench.launch.local.fork_server import ForkServer
from shardmark.bench.launch.outcome import kernel_oom_kills
from shardmark.bench.launch.trial_artifacts import NODE_SAMPLES, RankSampler, process_ends
from shardmark.extras.engines.nodes.addresses import interface_variables
from shardmark.extras.engines.nodes.protocol import (
    AuthenticationError,
    Channel,
    ChannelEndedError,
    JoinOptions,
    Message,
    files_below,
    is_result,
    shared_secret,
    store_piece,
)
from shardmark.ranks.measure.system.environment import environment
from shardmark.ranks.trial import Trial
from shardmark.scripts.command import free_port

TICK_SECONDS = 0.2
RETRY_SECONDS = 0.5
MIRROR_SECONDS = 1.0
"""Time between two transfers of the small files that the controller reads during a trial."""
MIRRORED = ("rank-*.json", "rank-*.progress")
AGENT_LOG = "agent.node-{}.log"


class Node:
    """Executes the requests of one controller.

    `with_files` says that the node works in the controller's folders.
    """

    def __init__(
        self, channel: Channel, *, number: int, with_files: bool, interface: str | None
    ) -> None:
        self.number = number
        self._channel = channel
        self._with_files = with_files
        self._interface = interface
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._fork_server = ForkServer()
        self._scratch = Path()

    def serve(self) -> str | None:
        """Serve until the run is over; return None, or why the connection ended."""
        with scratch_folder() as self._scratch:
            receiver = threading.Thread(target=self._receive, name="controller")
            receiver.start()
            try:
                while True:
                    message = self._inbox.get()
                    if message["do"] == "bye":
                        return None
                    if message["do"] == "gone":
                        return str(message["reason"])
                    with suppress(ChannelEndedError):  # the receiver puts `gone` into the inbox
                        self._handle(message)
            finally:
                self._fork_server.close()
                self._channel.close()
                receiver.join()

    @property
    def _captures(self) -> Path:
        """Folder of the ranks' captures that the controller sends for `compare`."""
        return self._scratch / "captures"

    def _handle(self, message: Message) -> None:
        try:
            answer = self._run(message) if message["do"] == "run" else self._answer(message)
        except StorageError as error:
            answer = {"storage_error": list(error.args[:3])}
        except InputError as error:
            answer = {"input_error": list(error.args[:3])}
        except ShardmarkError as error:
            answer = {"error": str(error)}
        except OSError as error:  # a disk of this machine; the node goes on
            remedy = REMEDIES.get(error.errno or 0, "check that machine")
            path = str(error.filename or self._scratch)
            answer = {"storage_error": [path, error.strerror or str(error), remedy]}
        request = {"request": message["request"]} if "request" in message else {}
        self._channel.send({**answer, **request})

    def _answer(self, message: Message) -> Message:
        if message["do"] == "machine":
            return asdict(self._fork_server.machine(message["device"]))
        if message["do"] == "environment":
            return environment()
        if message["do"] == "port":
            return {"port": free_port(message["address"])}
        if message["do"] == "load":
            self._fork_server.load(message["modules"], message["device_type"])
        return {}

    def _run(self, request: Message) -> Message:
        trial, measured = None, None
        if request["trial"] is not None:
            trial = Trial.model_validate_json(request["trial"])
            measured = trial if request["task"] == "measure" else None
        with ExitStack() as stack:
            directory = Path(request["directory"])
            if not self._with_files:
                directory = self._scratch / "trial"
                directory.mkdir(parents=True, exist_ok=True)
                for folder in (directory, self._captures):
                    stack.callback(shutil.rmtree, folder, ignore_errors=True)
                self._write_inputs(request, directory)
            variables: dict[str, str] = {}
            if request["rendezvous"] is not None:
                variables[RENDEZVOUS_VARIABLE] = json.dumps(request["rendezvous"])
                variables |= interface_variables(self._interface, request["rendezvous"]["address"])
            kills_before = kernel_oom_kills()
            try:
                exit_code = self._run_ranks(measured, request["task"], directory, variables)
            except ShardmarkError:
                raise
            except BaseException:
                self._fork_server.close()  # ranks must not write into folders that are removed now
                raise
            self._send_files(trial, directory)
            return {
                "ended": exit_code,
                "failures": [asdict(end) for end in process_ends(directory)],
                "oom_kills": kernel_oom_kills() - kills_before,
            }

    def _write_inputs(self, request: Message, directory: Path) -> None:
        """Write the trial, or for `compare` the list of the cells whose captures were sent."""
        if request["trial"] is not None:
            (directory / TRIAL_FILE).write_text(request["trial"])
        else:
            cells = sorted(self._captures.iterdir(), key=lambda cell: int(cell.name))
            (directory / CELLS_FILE).write_text(json.dumps([str(cell) for cell in cells]))

    def _run_ranks(
        self, measured: Trial | None, task: Task, directory: Path, variables: Mapping[str, str]
    ) -> int:
        """Run the node's ranks, sample them if they are measured, and return the exit code."""
        with ExitStack() as stack:
            look: Callable[[], None] = lambda: None  # noqa: E731
            if measured is not None:
                ranks = measured.layout.ranks_by_node[self.number]
                file = NODE_SAMPLES.format(self.number)
                sampler = RankSampler(directory, file, ranks, measured.measure.sample_seconds)
                look = stack.enter_context(sampler).look
            mirror = Mirror(self._channel, directory)
            self._fork_server.begin(directory, task, variables)
            exit_code = None
            while exit_code is None:
                exit_code = self._fork_server.ended(TICK_SECONDS)
                look()
                if not self._with_files:
                    with suppress(ChannelEndedError):
                        mirror.look()
                if exit_code is None and self._must_end():
                    exit_code = self._fork_server.reap()
            return exit_code

    def _must_end(self) -> bool:
        """Return whether the controller ends the trial, or the connection has ended."""
        with suppress(queue.Empty):
            message = self._inbox.get_nowait()
            if message["do"] == "end":
                if message["stacks"]:
                    self._fork_server.show_stacks()
                return True
            self._inbox.put(message)  # read by `serve`
            return message["do"] in ("bye", "gone")
        return False

    def _send_files(self, trial: Trial | None, directory: Path) -> None:
        ranks = () if trial is None else trial.layout.ranks_by_node[self.number]
        if self._with_files:
            return
        for path, name in files_below(directory):
            sent_name = AGENT_LOG.format(self.number) if name == "agent.log" else name
            if is_result(sent_name, node=self.number, ranks=ranks):
                with path.open("rb") as file:
                    self._channel.send_file(file, sent_name)

    def _receive(self) -> None:
        try:
            while True:
                message, piece = self._channel.receive()
                if "file" in message:
                    store_piece(self._captures, message, piece)
                else:
                    self._inbox.put(message)
        except (ChannelEndedError, OSError) as ended:
            self._inbox.put({"do": "gone", "reason": str(ended)})


class Mirror:
    """Sends the small files of a trial's folder when they change."""

    def __init__(self, channel: Channel, directory: Path) -> None:
        self._channel = channel
        self._directory = directory
        self._sent: dict[str, bytes] = {}
        self._due = 0.0

    def look(self) -> None:
        if time.monotonic() < self._due:
            return
        self._due = time.monotonic() + MIRROR_SECONDS
        for path in (path for pattern in MIRRORED for path in self._directory.glob(pattern)):
            with suppress(FileNotFoundError):
                content = path.read_bytes()
                if self._sent.get(path.name) != content:
                    self._channel.send_file(BytesIO(content), path.name)
                    self._sent[path.name] = content


def join(join_options: JoinOptions, secret: str, starter: IO[str] | None = None) -> Node:
    """Connect to the controller, and wait for it if necessary.  Raises `ShardmarkError` if refused.

    `starter` is a pipe that closes with the process that started this one; then the wait ends.
    """
    controller = f"{join_options.host}:{join_options.port}"
    number = join_options.number
    if join_options.number_variable is not None:
        number = int(os.environ[join_options.number_variable])
    with_files = join_options.with_files and number == 0
    channel = _connect(join_options, secret, starter)
    hello = {"number": number, "host": platform.node(), "address": channel.local_address}
    try:
        channel.send(
            hello | {"with_files": with_files, "key": {**join_options.key, **library_versions()}}
        )
        answer, _ = channel.receive()
    except ChannelEndedError as ended:
        channel.close()
        raise ShardmarkError(f"{controller} takes no nodes: {ended}") from None
    if "refused" in answer:
        channel.close()
        raise ShardmarkError(f"{controller} refuses this node: {answer['refused']}")
    os.environ.pop(SECRET_VARIABLE, None)  # ranks do not need it
    channel.keep_alive(float(answer["silence_seconds"]))
    number = int(answer["welcome"])
    return Node(channel, number=number, with_files=with_files, interface=join_options.interface)


def _connect(join_options: JoinOptions, secret: str, starter: IO[str] | None) -> Channel:
    """Connect and authenticate; try again until `join_seconds` have passed."""
    controller, seconds = f"{join_options.host}:{join_options.port}", join_options.join_seconds
    deadline = time.monotonic() + seconds
    while True:
        channel = None
        try:
            address = join_options.host, join_options.port
            channel = Channel(socket.create_connection(address, timeout=seconds))
            channel.prove(secret, controls=False)
            return channel
        except (OSError, ChannelEndedError) as error:
            if channel is not None:
                channel.close()
            if isinstance(error, AuthenticationError):
                remedy = f"use the same {SECRET_VARIABLE}, or secret file, on all nodes"
                raise ShardmarkError(f"{controller} refuses this node: {error}; {remedy}") from None
            if time.monotonic() > deadline:
                reason = getattr(error, "strerror", None) or error
                raise ShardmarkError(
                    f"no controller at {controller} within {seconds:g} s: {reason}"
                ) from None
            if starter is None:
                time.sleep(RETRY_SECONDS)
            elif select.select([starter], [], [], RETRY_SECONDS)[0]:
                ended = "the process that started this node has ended"
                raise ShardmarkError(f"no controller at {controller}, and {ended}") from None


def main(join_options: str) -> int:
    """Run this module as `python -m ... JOIN_OPTIONS`, which engines start on a node."""
    # SIGTERM ends the ranks and removes folders.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        # The starter passes the secret by standard input or the environment.
        line = sys.stdin.readline().strip() if sys.stdin is not None else ""
        secret = line or shared_secret()
        starter = sys.stdin if line else None  # which `StartedCommand` keeps open
        reason = join(JoinOptions(**json.loads(join_options)), secret, starter).serve()
    except ShardmarkError as error:
        say(*str(error).split("\n"), error=True)
        return 1
    if reason is not None:
        say(f"the connection to the controller ended: {reason}", error=True)
    return int(reason is not None)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
