"""An engine over node processes, whoever starts them."""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Protocol

from shardmark.core.errors import InputError, ShardmarkError
from shardmark.core.machine import Machine
from shardmark.launch.engine import Task
from shardmark.launch.nodes.channel import Message
from shardmark.launch.nodes.returning import Returns, patience_seconds, with_returns
from shardmark.launch.nodes.roster import Member, NodeLostError, Roster
from shardmark.launch.nodes.watch import Watch
from shardmark.launch.outcome import Ending, LostNode, ProcessEnd
from shardmark.launch.restarts import NoticedCause, first_causes
from shardmark.launch.seats import Place, seats_of
from shardmark.trials.trial import Trial

TICK_SECONDS = 0.2
GRACE_SECONDS = 5.0
"""For the ranks of other nodes to fail by themselves, once those of one have failed."""
END_SECONDS = 30.0
"""For a node to end a trial and to send its files, as long as it is heard."""
TRIAL_FILE = "trial.json"


class Starter(Protocol):
    """Starts a node process for each node, or waits for them to be started."""

    def start(self, roster: Roster) -> None:
        """Nodes are to come to the roster's port."""

    def check(self) -> None:
        """Raise `ShardmarkError` if some node will not come."""

    def close(self) -> None:
        """The nodes have been told to end; see to it that they do."""


class ClusterEngine:
    """Has the ranks of a trial forked on each of its nodes, and brings their files."""

    samples = True

    def __init__(
        self,
        make_roster: Callable[[], Roster],
        starter: Starter,
        *,
        join_seconds: float,
        tell: Callable[[str], None],
        meet: Callable[[Sequence[Member]], tuple[str, int]] | None = None,
    ) -> None:
        self._make_roster = make_roster
        self._meet = meet or at_the_controller
        self._starter = starter
        self._join_seconds = join_seconds
        self._tell = tell
        self._roster: Roster | None = None
        self._load: Message | None = None

    def machine(self, device: str) -> Machine:
        roster = self._gathered()
        found = roster.ask(self._numbers(), {"do": "machine", "device": device})
        machines: list[Machine] = []
        for number, answer in sorted(found.items()):
            title = roster.member(number).title
            _raise_errors(title, answer)
            machine = Machine(**answer | {"device_names": tuple(answer["device_names"])})
            if machines and machine.device_type != machines[0].device_type:
                kinds = f"{title} has {machine.device_type}, node 0 {machines[0].device_type}"
                raise InputError("device", kinds, "set device: cpu, or device: cuda")
            machines.append(machine)
        return Machine(
            device_type=machines[0].device_type,
            device_count=min(machine.device_count for machine in machines),
            cores=min(machine.cores for machine in machines),
            device_names=tuple(dict.fromkeys(n for one in machines for n in one.device_names)),
        )

    def environments(self) -> list[dict[str, Any]]:
        found = self._gathered().ask(self._numbers(), {"do": "environment"})
        return [{"node": number, **found[number]} for number in sorted(found)]

    def load(self, modules: Sequence[str], device_type: str) -> None:
        self._load = {"do": "load", "modules": list(modules), "device_type": device_type}
        self._prepare(self._gathered().members())

    def lacks(self, nodes: int) -> str | None:
        roster = self._gathered()
        there = len(roster.members())
        if nodes > there:
            return f"{nodes} nodes are asked for, and the engine has {there}"
        lost = roster.lost(range(nodes))
        return None if lost is None else f"node {lost.node} ({lost.host}) was lost: {lost.reason}"

    def prepare(self, trial: Trial) -> None:
        """The nodes are there, with what they have loaded."""

    def run(
        self,
        directory: Path,
        *,
        trial_seconds: float,
        on_tick: Callable[[], None],
        task: Task = "measure",
    ) -> Ending:
        roster = self._gathered()
        text = None if task == "judge" else (directory / TRIAL_FILE).read_text()
        trial = None if text is None else Trial.model_validate_json(text)
        watch = Watch(range(1 if trial is None else trial.nodes))
        self._prepare([roster.member(number) for number in watch.numbers])
        roster.keep_files_in(directory)
        started = time.monotonic()
        places = self._places(len(watch.numbers))
        request = {"do": "run", "directory": str(directory.resolve()), "trial": text, "task": task}
        for number in watch.numbers:
            roster.tell(number, request | {"place": places[number]})

        def again(number: int) -> None:
            member = roster.member(number)
            self._tell(f"{member.title} has come back")
            with suppress(NodeLostError):  # which the next look sees
                self._prepare([member])
                place = {**(places[number] or {}), "address": member.address}
                roster.tell(number, request | {"place": place, "resume": True})

        returns = Returns(roster, watch.numbers, seconds=patience_seconds(trial, task), again=again)
        how, lost = "exited", None
        try:
            while watch.running and lost is None:
                watch.collect(roster, TICK_SECONDS)
                lost = returns.look(watch.running)
                if time.monotonic() - started > trial_seconds and watch.running:
                    how = "timed_out"
                    break
                if time.monotonic() - (watch.failed_at or math.inf) > GRACE_SECONDS:
                    break
                on_tick()
        except KeyboardInterrupt:
            how = "interrupted"
        finally:
            self._end(watch, stacks=how == "timed_out")
            roster.keep_files_in(None)
        on_tick()
        ending = self._ending(watch, trial, how, lost or roster.lost(watch.running))
        return replace(ending, restarts=with_returns(ending.restarts, returns.returned))

    def close(self) -> None:
        if self._roster is not None:
            self._roster.close()
            self._starter.close()
            self._roster = None

    def _gathered(self) -> Roster:
        """The roster with all nodes."""
        if self._roster is None:
            self._roster = self._make_roster()
            self._starter.start(self._roster)
            if self._roster.wanted > 1:
                self._tell(f"waiting for {self._roster.wanted} nodes at {self._roster.place}")
            self._roster.wait(self._join_seconds, self._starter.check, self._tell)
            for member in self._roster.members():
                self._tell(f"{member.title} is here, {member.address}")
        return self._roster

    def _numbers(self) -> list[int]:
        return [member.number for member in self._gathered().members()]

    def _prepare(self, members: Sequence[Member]) -> None:
        """Have nodes load what ranks need; those that came back as well."""
        fresh = [member.number for member in members if not member.prepared and not member.lost]
        if self._load is None or not fresh:
            return
        for number, answer in self._gathered().ask(fresh, self._load).items():
            member = self._gathered().member(number)
            _raise_errors(member.title, answer)
            member.prepared = True

    def _places(self, nodes: int) -> list[Mapping[str, Any] | None]:
        """Where the launchers of the nodes meet; nothing to say for one node."""
        if nodes == 1:
            return [None]
        members = self._gathered().members()[:nodes]
        first, port = self._meet(members)
        addresses = [first, *(member.address for member in members[1:])]
        host = f"[{first}]" if ":" in first else first
        endpoint = f"{host}:{port}"
        return [
            asdict(Place(node=number, endpoint=endpoint, address=address))
            for number, address in enumerate(addresses)
        ]

    def _end(self, watch: Watch, *, stacks: bool) -> None:
        """Have the trial ended wherever it still runs."""
        roster = self._gathered()
        for number in watch.running:
            roster.tell(number, {"do": "end", "stacks": stacks})
        deadline = time.monotonic() + END_SECONDS
        while time.monotonic() < deadline:
            watch.collect(roster, 0)
            if all(roster.member(number).lost is not None for number in watch.running):
                return
            time.sleep(TICK_SECONDS / 4)

    def _ending(self, watch: Watch, trial: Trial | None, how: str, lost: LostNode | None) -> Ending:
        for number, answer in watch.answers.items():
            if "error" in answer:
                raise ShardmarkError(f"{self._gathered().member(number).title}: {answer['error']}")
        ahead = {n: self._gathered().member(n).ahead_seconds or 0.0 for n in watch.numbers}
        failures = [
            ProcessEnd(**end | {"at_seconds": end["at_seconds"] - ahead[number]})
            for number, answer in watch.answers.items()
            for end in answer["failures"]
        ]
        codes = [int(answer["ended"]) for answer in watch.answers.values()]
        seats = seats_of(trial) if trial is not None else ()
        return Ending(
            how=how,  # type: ignore[arg-type]  # one of its three values
            agent_exit_code=next((code for code in codes if code != 0), 0 if codes else None),
            failures=tuple(failures),
            oom_kills=sum(answer["oom_kills"] for answer in watch.answers.values()),
            lost=lost,
            restarts=first_causes(
                NoticedCause(**one | {"at_seconds": one["at_seconds"] - ahead[number]})
                for number, answer in watch.answers.items()
                for one in answer.get("restarts", ())
            ),
            clocks_ahead_seconds={r: ahead[n] for n, ranks in enumerate(seats) for r in ranks},
        )


def at_the_controller(members: Sequence[Member]) -> tuple[str, int]:
    """An address of node 0, which is this machine, that others reach, and a free port of it."""
    address = members[1].dialled
    return address, free_port(address)


def free_port(address: str) -> int:
    """A port of this machine that nobody listens on."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


def _raise_errors(title: str, answer: Message) -> None:
    """What a node could not do, as the local engine would say it."""
    if "input_error" in answer:
        where, found, allowed = answer["input_error"]
        raise InputError(where, f"{title}: {found}", allowed)
    if "error" in answer:
        raise ShardmarkError(f"{title}: {answer['error']}")
