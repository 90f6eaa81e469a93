"""The process that stands for one node: has ranks forked, samples them, and sends what they leave.

It imports no torch.  Whatever starts it, it does what the controller says until that says that the
run is over, or is gone.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path

from shardmark.core.environment_variables import FOLDER_VARIABLE
from shardmark.core.errors import InputError, ShardmarkError
from shardmark.launch.engine import Task
from shardmark.launch.local.fork_server import ForkServer, show_stacks
from shardmark.launch.local.rank_starter import RankStarter
from shardmark.launch.nodes.channel import Channel, ChannelEndedError, Message, files_below
from shardmark.launch.nodes.interfaces import interface_variables
from shardmark.launch.nodes.mirror import Mirror
from shardmark.launch.nodes.roster import BEAT_SECONDS
from shardmark.launch.nodes.scratch import LOCK_FILE, remove_abandoned, scratch_folder
from shardmark.launch.outcome import kernel_oom_kills
from shardmark.launch.restarts import RESTARTS_FILE, read_restarts
from shardmark.launch.sampling import RankSampler
from shardmark.launch.seats import PLACE_FILE, Place, seats_of
from shardmark.launch.trial_artifacts import (
    AGENT_FILE,
    NODE_SAMPLES,
    number_logs,
    process_ends,
)
from shardmark.measure.system.environment import environment
from shardmark.train.checkpoint_folder import folder_on_node, remove
from shardmark.trials.trial import Trial

TICK_SECONDS = 0.2
TRIAL_FILE = "trial.json"
NOT_SENT = (TRIAL_FILE, PLACE_FILE, AGENT_FILE, RESTARTS_FILE, LOCK_FILE)
AGENT_LOG = "agent.node-{}.log"


class Node:
    """Does what one controller says."""

    def __init__(
        self,
        channel: Channel,
        *,
        number: int,
        here: bool,
        interface: str | None,
        patience: float,
        nursery: RankStarter | None = None,
    ) -> None:
        self._channel = channel
        self.number = number
        self._here = here
        self._interface = interface
        self._patience = patience
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._nursery: RankStarter = nursery or ForkServer()
        self._closing = threading.Event()
        self._gone = False

    def serve(self) -> str | None:
        """Until the run is over: None, or why the controller cannot be reached any more."""
        remove_abandoned()
        threads = [threading.Thread(target=work) for work in (self._hear, self._beat)]
        for thread in threads:
            thread.start()
        try:
            while True:
                message = self._inbox.get()
                if message["do"] == "bye":
                    return None
                if message["do"] == "gone":
                    return str(message["reason"])
                with suppress(ChannelEndedError):  # `gone` is on its way
                    self._handle(message)
        finally:
            self._closing.set()
            self._nursery.close()
            self._channel.close()
            for thread in threads:
                thread.join()

    def _handle(self, message: Message) -> None:
        if message["do"] == "machine":
            self._answer(lambda: asdict(self._nursery.machine(message["device"])))
        elif message["do"] == "environment":
            self._answer(environment)
        elif message["do"] == "load":
            self._answer(lambda: self._load(message))
        elif message["do"] == "run":
            self._run(message)

    def _load(self, message: Message) -> Message:
        self._nursery.load(message["modules"], message["device_type"])
        return {}

    def _answer(self, work: Callable[[], Message]) -> None:
        try:
            found = work()
        except InputError as error:
            found = {"input_error": list(error.args)}
        except ShardmarkError as error:
            found = {"error": str(error)}
        self._channel.send(found)

    def _run(self, request: Message) -> None:
        with ExitStack() as stack:
            if self._here:
                directory = Path(request["directory"])
            else:
                directory = stack.enter_context(scratch_folder())
                if request["trial"] is not None:
                    (directory / TRIAL_FILE).write_text(request["trial"])
            checkpoints = self._checkpoints(request)
            stack.callback(self._forget, checkpoints, request)
            kills_before = kernel_oom_kills()
            try:
                exit_code = self._watched(request, directory, checkpoints)
            except ShardmarkError as error:
                self._channel.send({"error": str(error)})
                return
            except BaseException:
                self._gone = True
                self._nursery.close()  # nobody writes into folders that are removed now
                raise
            self._send_all(request, directory)
            ends = [asdict(end) for end in process_ends(directory)]
            kills = kernel_oom_kills() - kills_before
            restarts = [one.model_dump() for one in read_restarts(directory)]
            self._channel.send(
                {"ended": exit_code, "failures": ends, "oom_kills": kills, "restarts": restarts}
            )

    def _checkpoints(self, request: Message) -> Path | None:
        """Where this node's ranks keep them; what another run left there is gone."""
        if request["task"] != "measure":
            return None
        trial = Trial.model_validate_json(request["trial"])
        folder = folder_on_node(trial, request["directory"], self.number, here=self._here)
        if not request.get("resume"):
            remove(folder)
        return folder

    def _forget(self, checkpoints: Path | None, request: Message) -> None:
        """Remove them, unless another process may come for them in this one's place."""
        if checkpoints is None:
            return
        limits = Trial.model_validate_json(request["trial"]).limits
        if not (self._gone and limits.node_return_seconds):
            remove(checkpoints)

    def _watched(self, request: Message, directory: Path, checkpoints: Path | None) -> int:
        """Run the trial's ranks of this node; the exit code of their launcher."""
        task: Task = request["task"]
        variables: dict[str, str] = {}
        if request["place"] is not None:
            place = Place(**request["place"])
            place.write(directory)
            variables |= interface_variables(self._interface, place.address)
        if checkpoints is not None:
            variables[FOLDER_VARIABLE] = str(checkpoints)
        with ExitStack() as stack:
            look: Callable[[], None] = lambda: None  # noqa: E731
            if task == "measure":
                trial = Trial.model_validate_json((directory / TRIAL_FILE).read_text())
                look = stack.enter_context(
                    RankSampler(
                        directory,
                        NODE_SAMPLES.format(self.number),
                        seats_of(trial)[self.number],
                        trial.measure.sample_seconds,
                    )
                ).look
            mirror = Mirror(self._channel, directory)
            self._nursery.begin(directory, task, variables)
            exit_code = None
            while exit_code is None:
                exit_code = self._nursery.ended(TICK_SECONDS)
                look()
                if not self._here:
                    with suppress(ChannelEndedError):
                        mirror.look()
                if exit_code is None and self._told_to_end(directory):
                    exit_code = self._nursery.reap()
            return exit_code

    def _told_to_end(self, directory: Path) -> bool:
        """Whether the controller wants the trial ended, or is gone."""
        with suppress(queue.Empty):
            message = self._inbox.get_nowait()
            if message["do"] == "end":
                if message["stacks"]:
                    show_stacks(directory)
                return True
            self._inbox.put(message)  # for `serve`
            return message["do"] in ("bye", "gone")
        return False

    def _send_all(self, request: Message, directory: Path) -> None:
        if request["task"] != "judge":
            trial = Trial.model_validate_json((directory / TRIAL_FILE).read_text())
            number_logs(directory, seats_of(trial)[self.number])
        if self._here:
            return
        for path, name in files_below(directory):
            if name not in NOT_SENT:
                renamed = AGENT_LOG.format(self.number) if name == "agent.log" else name
                self._channel.send_file(path, renamed)

    def _hear(self) -> None:
        try:
            while True:
                message, _ = self._channel.receive()
                if message["do"] != "beat":
                    self._inbox.put(message)
        except (ChannelEndedError, KeyError) as ended:
            self._gone = True
            self._inbox.put({"do": "gone", "reason": str(ended)})

    def _beat(self) -> None:
        with suppress(ChannelEndedError):
            while not self._closing.wait(min(BEAT_SECONDS, self._patience / 5)):
                self._channel.send({"beat": time.time()})
