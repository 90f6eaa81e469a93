"""The ranks of one node, each in an actor of its own, as `launch.node` sees them."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from shardmark.core.errors import ShardmarkError
from shardmark.core.machine import Machine
from shardmark.launch.engine import Task
from shardmark.launch.nodes.cluster import free_port
from shardmark.launch.ray.agent_files import AGENT_LOG, death_file
from shardmark.launch.ray.connection import reason_of
from shardmark.launch.ray.judging import Testimony
from shardmark.launch.ray.plan import Room
from shardmark.launch.seats import Place, read_place, seats_of
from shardmark.launch.trial_artifacts import AGENT_FILE
from shardmark.trials.trial import Trial

TRIAL_FILE = "trial.json"
HERE = "127.0.0.1"
END_SECONDS = 10.0
ANSWER_SECONDS = 20.0
"""For an actor that does nothing to say that it is there."""


class RayNursery:
    """Does with actors what `ForkServer` does with one process."""

    def __init__(self, make: Callable[..., Any], room: Room, testimony: Testimony) -> None:
        self._make = make
        self._room = room
        self._testimony = testimony
        self._actors: dict[int, Any] = {}
        self._devices: dict[int, str] = {}
        self._loaded: tuple[list[str], str] | None = None
        self._directory = Path()
        self._ranks: Sequence[int] = ()
        self._running: dict[Any, int] = {}
        self._codes: dict[int, int] = {}
        self._deaths: list[dict[str, Any]] = []

    def machine(self, device: str) -> Machine:
        """What all ranks of the node have together.  `InputError` if one has it not."""
        self._fill()
        devices = self._room.devices if device != "cpu" else 1
        asked = {local: self._actors[local] for local in range(devices)}
        found = [Machine(**answer) for answer in self._each(asked, "machine", device)]
        return Machine(
            device_type=found[0].device_type,
            device_count=sum(one.device_count for one in found),
            cores=found[0].cores,
            device_names=tuple(dict.fromkeys(name for one in found for name in one.device_names)),
        )

    def load(self, modules: Sequence[str], device_type: str) -> None:
        """Import what every rank needs, and these; `ShardmarkError` where torch cannot be had."""
        self._fill()
        self._loaded = (list(modules), device_type)
        self._each(self._actors, "load", *self._loaded)

    def heal(self) -> None:
        """Replace actors that have died.  `ShardmarkError` if Ray gives no others."""
        import ray

        asked = {local: actor.devices.remote() for local, actor in self._actors.items()}
        for local, answer in asked.items():
            try:
                ray.get(answer, timeout=ANSWER_SECONDS)
            except ray.exceptions.RayError:
                self._drop(local)
        fresh = self._fill()
        if fresh and self._loaded is not None:
            self._each(fresh, "load", *self._loaded)

    def begin(self, directory: Path, task: Task, variables: Mapping[str, str]) -> None:
        """Have the node's ranks of the trial forked, with these environment variables on top."""
        self._directory, self._codes, self._deaths = directory, {}, []
        if len(self._actors) < self._room.ranks:
            self.heal()
        if task == "judge":
            self._testimony.list_in(directory)
            self._ranks, places = (0,), [self._shared()]
        else:
            trial = Trial.model_validate_json((directory / TRIAL_FILE).read_text())
            place = read_place(directory)
            self._ranks = seats_of(trial)[place.node]
            size = sum(map(len, seats_of(trial)))
            places = rank_variables(self._ranks, place, world_size=size)
            places = [one | self._shared() for one in places]
        self._running = {
            self._actors[local].run.remote(str(directory), task, {**variables, **place}): local
            for local, place in enumerate(places)
        }

    def ended(self, timeout_seconds: float) -> int | None:
        """0 once all ranks have ended well, 1 once all have ended; None if not within that time.

        When one has ended badly the others are ended, as the launcher does elsewhere.
        """
        import ray

        ended, _ = ray.wait(list(self._running), num_returns=1, timeout=timeout_seconds)
        for answer in ended:
            self._collect(answer)
        if self._running:
            if any(self._codes.values()):
                self._end_all()
            return None
        (self._directory / AGENT_FILE).write_text(json.dumps(self._deaths))
        return int(any(self._codes.values()))

    def reap(self) -> int:
        """End the trial's processes."""
        import ray

        self._end_all()
        deadline = time.monotonic() + END_SECONDS
        while self._running and time.monotonic() < deadline:
            ended, _ = ray.wait(list(self._running), num_returns=1, timeout=END_SECONDS)
            for answer in ended:
                self._collect(answer)
        for local in list(self._running.values()):
            self._drop(local)  # its rank dies with it
        self._running = {}
        (self._directory / AGENT_FILE).write_text(json.dumps(self._deaths))
        return -signal.SIGKILL

    def close(self) -> None:
        """End the actors, and with them whatever runs."""
        import ray

        with suppress(ray.exceptions.RayError):
            asked = [actor.close.remote() for actor in self._actors.values()]
            if asked:
                ray.wait(asked, num_returns=len(asked), timeout=END_SECONDS)
        for local in list(self._actors):
            self._drop(local)

    def _fill(self) -> dict[int, Any]:
        """Have an actor for each local rank, the first ones with a device; the new ones."""

        fresh = {
            local: self._make(with_device=local < self._room.devices)
            for local in range(self._room.ranks)
            if local not in self._actors
        }
        self._actors |= fresh
        seen = self._each(fresh, "devices")
        self._devices |= dict(zip(fresh, seen, strict=True))
        return fresh

    def _shared(self) -> dict[str, str]:
        """Every rank sees the node's devices, its own at its local rank's place among them."""
        told = [self._devices[local] for local in range(self._room.devices)]
        return {"CUDA_VISIBLE_DEVICES": ",".join(told)} if all(told) else {}

    def _each(self, actors: Mapping[int, Any], method: str, *given: Any) -> list[Any]:
        """What each answers, all at work at once; their errors are raised as they were."""
        import ray

        asked = [getattr(actor, method).remote(*given) for actor in actors.values()]
        try:
            return list(ray.get(asked))
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, ShardmarkError):
                raise error.cause from None
            raise ShardmarkError(f"an actor of a rank: {reason_of(error)}") from None
        except ray.exceptions.RayError as error:
            raise ShardmarkError(f"an actor of a rank: {reason_of(error)}") from None

    def _collect(self, answer: Any) -> None:
        """Note how a rank has ended."""
        import ray

        local = self._running.pop(answer)
        noted = self._directory / death_file(local)
        try:
            self._codes[local] = int(ray.get(answer))
        except ray.exceptions.RayError as error:
            self._codes[local] = -signal.SIGKILL
            self._say(f"the actor of rank {self._ranks[local]} has died: {reason_of(error)}")
            self._drop(local)
            self._deaths.append(
                {
                    "rank": self._ranks[local],
                    "exit_code": -signal.SIGKILL,
                    "at_seconds": time.time(),
                }
            )
            return
        if noted.exists():
            self._deaths.append(json.loads(noted.read_text()))
            noted.unlink()

    def _end_all(self) -> None:
        for local in self._running.values():
            self._actors[local].end.remote(str(self._directory))

    def _drop(self, local: int) -> None:
        import ray

        actor = self._actors.pop(local, None)
        if actor is not None:
            with suppress(ray.exceptions.RayError):
                ray.kill(actor)

    def _say(self, text: str) -> None:
        with (self._directory / AGENT_LOG).open("a") as log:
            log.write(f"{text}\n")


def rank_variables(ranks: Sequence[int], place: Place, *, world_size: int) -> list[dict[str, str]]:
    """What each rank of a node needs to join the process group; its store outlives rank 0."""
    host, _, port = place.endpoint.rpartition(":")
    if port == "0":
        host, port = HERE, str(free_port(HERE))
    told = {
        "MASTER_ADDR": host.strip("[]"),
        "MASTER_PORT": port,
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(len(ranks)),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    return [told | {"RANK": str(rank), "LOCAL_RANK": str(n)} for n, rank in enumerate(ranks)]
