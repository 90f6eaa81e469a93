"""The engine of runs on several nodes, each with a node process."""

from __future__ import annotations

import json
import math
import queue
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from pydantic import TypeAdapter

from shardmark.base.errors import InputError, ShardmarkError, StorageError
from shardmark.base.files.run_files import TRIAL_FILE
from shardmark.base.machine import Machine
from shardmark.base.results.verification import CELLS_FILE
from shardmark.bench.launch.engine import EngineRequest, Task
from shardmark.bench.launch.outcome import Ending, LostNode, ProcessEnd
from shardmark.bench.launch.placement import MeetingPoint
from shardmark.extras.engines.nodes.protocol import Message, files_below
from shardmark.extras.engines.nodes.registry import ConnectedNode, NodeLostError, NodeRegistry
from shardmark.ranks.trial import Trial

if TYPE_CHECKING:
    from shardmark.experiment.engines import NodeOptions

TICK_SECONDS = 0.2
PAUSE_SECONDS = 0.01
GRACE_SECONDS = 5.0
"""Time for ranks of other nodes to fail by themselves, after those of one node have failed."""
END_SECONDS = 30.0
"""Time limit for a live node to end a trial and to send its files."""
MACHINE = TypeAdapter(Machine)
COMMON_TITLE = "shardmark"
"""Name of the job step of nodes that serve more than one trial."""


class NodeStarter(Protocol):
    """Starts a node process for each node, unless users start them."""

    new_nodes_for_each_trial: bool = False
    """True if each trial has new node processes."""
    secret: str
    """Secret of the run, which the starter passes to the nodes."""

    def address(self, nodes: int) -> tuple[str, int]:
        """Return this machine's address for so many nodes; port 0 takes any that is free."""

    def start(self, registry: NodeRegistry, title: str) -> None:
        """Start as many nodes as the registry expects; the title names their purpose."""

    def check(self) -> None:
        """Raise `ShardmarkError` if a node cannot join any more."""

    def is_ending(self) -> bool:
        """Return whether a scheduler is ending all processes of the run."""
        return False

    def close(self) -> None:
        """End the nodes' processes, after the nodes were told to end.  May be called twice."""


class NodesEngine:
    """Starts the ranks of a trial on each of its nodes, and collects their files."""

    samples = True

    def __init__(self, options: NodeOptions, starter: NodeStarter, request: EngineRequest) -> None:
        self._options = options
        self._starter = starter
        self._request = request
        self._registry: NodeRegistry | None = None
        self._load: Message | None = None
        self._unreachable: tuple[int, str] | None = None
        """Number of nodes that failed to join, and the reason."""

    def machine(self, device: str) -> Machine:
        machines: list[Machine] = []
        for title, answer in self._ask_all({"do": "machine", "device": device}).items():
            machine = MACHINE.validate_python(answer)
            if machines and machine.device_type != machines[0].device_type:
                kinds = f"{title} has {machine.device_type}, node 0 {machines[0].device_type}"
                raise InputError("device", kinds, "set device: cpu, or device: cuda")
            machines.append(machine)
        names = (name for machine in machines for name in machine.device_names)
        return replace(
            machines[0],
            device_count=min(machine.device_count for machine in machines),
            cores=min(machine.cores for machine in machines),
            device_names=tuple(dict.fromkeys(names)),
            has_bf16=all(machine.has_bf16 for machine in machines),
        )

    def environments(self) -> list[dict[str, Any]]:
        answers = self._ask_all({"do": "environment"}).values()
        return [{"node": number, **answer} for number, answer in enumerate(answers)]

    def load(self, modules: Sequence[str], device_type: str) -> None:
        """Import the modules on all nodes, or in `prepare` if each trial has nodes of its own."""
        self._load = {"do": "load", "modules": list(modules), "device_type": device_type}
        if not self._starter.new_nodes_for_each_trial:
            self._load_on(range(self._request.nodes))

    def unavailable_reason(self, nodes: int) -> str | None:
        if nodes > self._request.nodes:
            return f"{nodes} nodes are asked for, and the engine has {self._request.nodes}"
        if self._unreachable is not None and nodes >= self._unreachable[0]:
            return self._unreachable[1]
        if self._starter.new_nodes_for_each_trial:
            return None
        lost = self._joined().lost(range(nodes))
        return None if lost is None else str(lost)

    def prepare(self, trial: Trial) -> None:
        """Start nodes and import libraries on them, outside the trial's timeout."""
        if not self._starter.new_nodes_for_each_trial:
            with suppress(NodeLostError):  # `unavailable_reason` reports it
                self._load_on(range(trial.nodes))
            return
        self.close()
        try:
            self._joined(trial.nodes, trial.id)
            self._load_on(range(trial.nodes))
        except InputError:
            raise  # the nodes have joined, but a module is missing
        except ShardmarkError as error:
            self._unreachable = (trial.nodes, str(error))
            self.close()

    def run(
        self,
        directory: Path,
        *,
        trial_seconds: float,
        on_tick: Callable[[], None],
        task: Task = "measure",
    ) -> Ending:
        registry = self._joined()
        text = None if task == "compare" else (directory / TRIAL_FILE).read_text()
        trial = None if text is None else Trial.model_validate_json(text)
        numbers = range(1 if trial is None else trial.nodes)
        try:
            self._load_on(numbers)
            rendezvous_of = self._rendezvous_of(len(numbers))
        except NodeLostError:
            if trial is None:
                raise
            return self._by_scheduler(
                Ending(status="exited", agent_exit_code=None, lost=registry.lost(numbers))
            )
        if trial is None and not registry.nodes[0].with_files:
            self._send_captures(directory)
        registry.store_files_in(directory, () if trial is None else trial.layout.ranks_by_node)
        started = time.monotonic()
        request = {"do": "run", "directory": str(directory.resolve()), "trial": text, "task": task}

        watch = TrialWatch(registry, numbers)
        for number in numbers:
            registry.send(number, request | {"rendezvous": rendezvous_of[number]})
        status, lost = "exited", None
        try:
            while watch.running and lost is None:
                watch.collect(TICK_SECONDS)
                lost = watch.lost()
                if time.monotonic() - started > trial_seconds and watch.running:
                    status = "timed_out"
                    break
                if time.monotonic() - watch.failed_at > GRACE_SECONDS:
                    break
                on_tick()
        except KeyboardInterrupt:
            status = "interrupted"
        finally:
            watch.end(stacks=status == "timed_out")
            registry.store_files_in(None)
        on_tick()
        lost = lost or watch.lost()
        watch.lose_running(f"it did not end the trial within {END_SECONDS:g} s")
        return self._ending(watch, trial, status, lost)

    def close(self) -> None:
        if self._registry is not None:
            self._registry.close()
            self._registry = None
        self._starter.close()

    def _joined(self, nodes: int | None = None, title: str = COMMON_TITLE) -> NodeRegistry:
        """Return the registry after so many nodes, by default all of the run, have joined."""
        if self._registry is None:
            num_nodes = nodes or self._request.nodes
            host, port = self._starter.address(num_nodes)
            try:
                self._registry = NodeRegistry(
                    (host, port),
                    num_nodes=num_nodes,
                    secret=self._starter.secret,
                    key=self._request.key,
                    silence_seconds=self._options.node_seconds,
                )
            except OSError as error:
                raise InputError(
                    "engine",
                    f"this machine cannot listen at {host}:{port}: {error.strerror or error}",
                    "name an address of this machine, and a free port",
                ) from None
            notify = self._request.notify if title == COMMON_TITLE else lambda _: None
            self._starter.start(self._registry, title)
            if self._registry.num_nodes > 1:
                notify(
                    f"waiting for {self._registry.num_nodes} nodes at {host}:{self._registry.port}"
                )
            self._registry.wait(self._options.join_seconds, self._starter.check, notify)
            for node in self._registry.in_order():
                notify(f"{node.title} has joined from {node.address}")
        return self._registry

    def _ask_all(self, message: Message) -> dict[str, Message]:
        """Return the answers of all nodes, in order, by their titles."""
        registry = self._joined()
        answers = registry.ask(registry.nodes, message)
        return {registry.nodes[n].title: _checked(registry.nodes[n], answers[n]) for n in answers}

    def _load_on(self, numbers: Iterable[int]) -> None:
        """Import the modules of the ranks on the nodes; nodes that have them answer at once."""
        if self._load is not None:
            registry = self._joined()
            alive = [number for number in numbers if registry.nodes[number].lost is None]
            for number, answer in registry.ask(alive, self._load).items():
                _checked(registry.nodes[number], answer)

    def _send_captures(self, directory: Path) -> None:
        """Send the ranks' captures to node 0, which does not have the controller's files."""
        cells = [Path(cell) for cell in json.loads((directory / CELLS_FILE).read_text())]
        for number, cell in enumerate(cells):
            for path, name in files_below(cell):
                self._joined().send_file(0, path, f"{number}/{name}")

    def _rendezvous_of(self, nodes: int) -> list[dict[str, Any] | None]:
        """Return the rendezvous of each node's launcher; None for a single node."""
        if nodes == 1:
            return [None]
        registry = self._joined()
        members = registry.in_order()[:nodes]
        with_files = members[0].with_files
        first = members[1].controller_address if with_files else members[0].address
        answer = registry.ask([0], {"do": "port", "address": first})[0]
        port = _checked(members[0], answer)["port"]
        addresses = [first, *(node.address for node in members[1:])]
        return [
            asdict(MeetingPoint(node=number, host=first, port=port, address=address))
            for number, address in enumerate(addresses)
        ]

    def _ending(
        self, watch: TrialWatch, trial: Trial | None, status: str, lost: LostNode | None
    ) -> Ending:
        nodes = self._joined().nodes
        for number, answer in watch.answers.items():
            _checked(nodes[number], answer)
        ahead = {number: nodes[number].channel.ahead_seconds or 0.0 for number in watch.numbers}
        failures = [
            entry | {"at_seconds": entry["at_seconds"] - ahead[number]}
            for number, answer in watch.answers.items()
            for entry in answer["failures"]
        ]
        ranks_of = trial.layout.ranks_by_node if trial is not None else ()
        ending = Ending(
            status=status,  # type: ignore[arg-type]  # one of its three values
            agent_exit_code=watch.exit_code(),
            failures=tuple(ProcessEnd(**end) for end in failures),
            oom_kills=sum(answer["oom_kills"] for answer in watch.answers.values()),
            lost=lost,
            clocks_ahead_seconds={
                rank: ahead[number] for number, ranks in enumerate(ranks_of) for rank in ranks
            },
        )
        succeeded = ending.agent_exit_code == 0 and not ending.failures and lost is None
        return ending if status != "exited" or succeeded else self._by_scheduler(ending)

    def _by_scheduler(self, ending: Ending) -> Ending:
        """Return the ending, as an interruption if a scheduler is ending the whole job."""
        if self._starter.is_ending():
            return replace(ending, status="interrupted", lost=None)
        return ending


class TrialWatch:
    """Watches a trial on several nodes: nodes that have ended it, and nodes that were lost."""

    def __init__(self, registry: NodeRegistry, numbers: Sequence[int]) -> None:
        self.numbers = numbers
        self.answers: dict[int, Message] = {}
        self.failed_at = math.inf
        """Time of the monotonic clock at which the first node's ranks had failed."""
        self._stopped: frozenset[int] = frozenset()
        self._registry = registry
        # Another process may join under a lost node's number: it does not belong to this trial.
        self._nodes = {number: registry.nodes[number] for number in numbers}

    @property
    def running(self) -> list[int]:
        return [number for number in self.numbers if number not in self.answers]

    def exit_code(self) -> int | None:
        """Return the exit code of a launcher that was killed, else the first one that is not 0."""
        codes = {number: int(answer["ended"]) for number, answer in self.answers.items()}
        killed = [c for number, c in codes.items() if c < 0 and number not in self._stopped]
        failed = (code for code in codes.values() if code != 0)
        return next(iter((*killed, *failed)), 0 if codes else None)

    def collect(self, seconds: float) -> None:
        """Collect answers of nodes that have ended the trial; wait for at most so long."""
        deadline = time.monotonic() + seconds
        while self.running:
            for number in self.running:
                with suppress(queue.Empty):
                    answer = self._nodes[number].answers.get_nowait()
                    if not any(key == "ended" or "error" in key for key in answer):
                        continue  # a late answer to an earlier request
                    self.answers[number] = answer
                    if answer.get("ended") != 0:
                        self.failed_at = min(self.failed_at, time.monotonic())
            if time.monotonic() >= deadline:
                return
            time.sleep(PAUSE_SECONDS)

    def lost(self) -> LostNode | None:
        """Return a node that was lost before it ended the trial, if there is one."""
        nodes = (self._nodes[number] for number in self.running)
        return next((node.lost for node in nodes if node.lost is not None), None)

    def lose_running(self, reason: str) -> None:
        """Drop nodes that still run: a late answer would look like that to another request."""
        for number in self.running:
            if self._nodes[number].lost is None:
                self._registry.lose(number, reason)

    def end(self, *, stacks: bool) -> None:
        """End the trial on all nodes that still run it; with `stacks`, ranks print theirs."""
        self._stopped = frozenset(self.running)
        for number in self.running:
            if self._nodes[number].lost is None:
                self._registry.send(number, {"do": "end", "stacks": stacks})
        deadline = time.monotonic() + END_SECONDS
        while time.monotonic() < deadline:
            self.collect(0)
            if all(self._nodes[number].lost is not None for number in self.running):
                return
            time.sleep(TICK_SECONDS / 4)


def _checked(node: ConnectedNode, answer: Message) -> Message:
    """Return the answer, or raise the error that the node reports in it."""
    if "storage_error" in answer:
        place, problem, remedy = answer["storage_error"]
        raise StorageError(place, f"{node.title}: {problem}", remedy)
    if "input_error" in answer:
        place, problem, allowed = answer["input_error"]
        raise InputError(place, f"{node.title}: {problem}", allowed)
    if "error" in answer:
        raise ShardmarkError(f"{node.title}: {answer['error']}")
    return answer
