"""The ranks of one node as Ray's actors, which are stood in for: no process is started."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardmark.config.load import from_mapping
from shardmark.core.errors import InputError, ShardmarkError
from shardmark.launch.ray import judging as ray_judging
from shardmark.launch.ray.agent_files import AGENT_LOG, death_file
from shardmark.launch.ray.nursery import RayNursery, rank_variables
from shardmark.launch.ray.plan import Room
from shardmark.launch.seats import Place
from shardmark.launch.trial_artifacts import process_ends
from shardmark.trials.matrix import expand
from tests.unit.launch.fakes import MAPPING


class RayError(Exception):
    """Ray's own error."""


class RayTaskError(RayError):
    """An error of an actor's method."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


class Answer:
    """What a remote call returns: a value, an error, or nothing yet."""

    def __init__(self, value: Any = None, *, there: bool = True) -> None:
        self.value, self.there = value, there

    def become(self, value: Any) -> None:
        self.value, self.there = value, True


class FakeRay:
    """As much of the module as the node's side uses."""

    class exceptions:  # noqa: N801  # a module in Ray
        RayError = RayError
        RayTaskError = RayTaskError

    def __init__(self) -> None:
        self.killed: list[Any] = []

    def get(self, asked: Any, timeout: float | None = None) -> Any:  # noqa: ARG002  # Ray's
        if isinstance(asked, list):
            return [self.get(one) for one in asked]
        assert asked.there, "Ray would wait"
        if isinstance(asked.value, Exception):
            raise asked.value
        return asked.value

    def wait(
        self, asked: list[Answer], num_returns: int = 1, timeout: float | None = None
    ) -> tuple[list[Answer], list[Answer]]:
        del timeout
        there = [one for one in asked if one.there][:num_returns]
        return there, [one for one in asked if one not in there]

    def kill(self, actor: Any) -> None:
        self.killed.append(actor)


class Remote:
    """A method of an actor."""

    def __init__(self, call: Callable[..., Answer]) -> None:
        self.remote = call


class FakeActor:
    """Remembers what it is told; a trial ends when the test says so."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.alive = True
        self.loaded: list[Any] = []
        self.ran: list[tuple[Any, ...]] = []
        self.answer = Answer(there=False)
        self.ended = 0
        self.machine_is: Any = {
            "device_type": "cuda" if device else "cpu",
            "device_count": int(bool(device)),
            "cores": 4,
            "device_names": ["H"] if device else [],
        }

    @property
    def devices(self) -> Remote:
        return Remote(lambda: Answer(self.device if self.alive else RayError("it is dead")))

    @property
    def machine(self) -> Remote:
        return Remote(lambda _: Answer(self.machine_is))

    @property
    def load(self) -> Remote:
        def load(*given: Any) -> Answer:
            self.loaded.append(given)
            return Answer()

        return Remote(load)

    @property
    def run(self) -> Remote:
        def run(*given: Any) -> Answer:
            self.ran.append(given)
            self.answer = Answer(there=False)
            return self.answer

        return Remote(run)

    @property
    def end(self) -> Remote:
        def end(_: str) -> Answer:
            self.ended += 1
            self.answer.become(-signal.SIGKILL)
            return Answer()

        return Remote(end)

    @property
    def close(self) -> Remote:
        return Remote(Answer)


class Stage:
    """A nursery of three ranks, two of which have a device where there are any."""

    def __init__(self, ray: FakeRay, folder: Path, *, gpus: bool = False) -> None:
        self.ray = ray
        self.made: list[FakeActor] = []
        self.gpus = gpus
        self.kept = folder / "kept"
        self.directory = folder / "trial"
        for one in (self.kept, self.directory):
            one.mkdir()
        room = Room(ranks=3, devices=2)
        self.nursery = RayNursery(self._make, room, ray_judging.Testimony(self.kept))

    def _make(self, *, with_device: bool) -> FakeActor:
        number = len(self.made)
        self.made.append(FakeActor(str(number + 4) if self.gpus and with_device else ""))
        return self.made[-1]

    def begin(self) -> list[FakeActor]:
        """A trial of two workers and a server, all of them here."""
        content = {
            **MAPPING,
            "matrix": {"strategy": [{"name": "ps-sync", "servers": 1}], "world_size": [2]},
        }
        (trial,) = expand(from_mapping(content), "cpu").trials
        (self.directory / "trial.json").write_text(trial.model_dump_json())
        self.nursery.load(["m"], "cpu")
        self.nursery.begin(self.directory, "measure", {"GLOO_SOCKET_IFNAME": "eth7"})
        return self.made


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    fake = FakeRay()
    monkeypatch.setitem(sys.modules, "ray", fake)
    return fake


@pytest.fixture
def stage(ray: FakeRay, tmp_path: Path) -> Stage:
    return Stage(ray, tmp_path)


def test_each_rank_is_told_its_place(stage: Stage) -> None:
    actors = stage.begin()
    given = [actor.ran[0] for actor in actors]
    assert [(directory, task) for directory, task, _ in given] == [
        (str(stage.directory), "measure")
    ] * 3
    told = [variables for *_, variables in given]
    ranks = [(one["RANK"], one["LOCAL_RANK"], one["WORLD_SIZE"]) for one in told]
    assert ranks == [("0", "0", "3"), ("1", "1", "3"), ("2", "2", "3")]
    assert {one["GLOO_SOCKET_IFNAME"] for one in told} == {"eth7"}
    assert len({one["MASTER_PORT"] for one in told}) == 1
    assert "CUDA_VISIBLE_DEVICES" not in told[0]


def test_ranks_of_a_node_see_its_devices_in_their_order(ray: FakeRay, tmp_path: Path) -> None:
    stage = Stage(ray, tmp_path, gpus=True)
    actors = stage.begin()
    assert {actor.ran[0][2]["CUDA_VISIBLE_DEVICES"] for actor in actors} == {"4,5"}
    machine = stage.nursery.machine("cuda")
    assert (machine.device_type, machine.device_count, machine.cores) == ("cuda", 2, 4)
    assert machine.device_names == ("H",)


def test_trial_has_ended_when_all_ranks_have(stage: Stage) -> None:
    actors = stage.begin()
    assert stage.nursery.ended(0) is None
    for actor in actors:
        actor.answer.become(0)
    assert [stage.nursery.ended(0) for _ in actors] == [None, None, 0]
    assert process_ends(stage.directory) == ()
    assert stage.made == actors, "they stay for the next trial"


def test_bad_end_of_one_ends_the_others_and_is_noted(stage: Stage) -> None:
    actors = stage.begin()
    death = {"rank": 1, "exit_code": -11, "at_seconds": 5.0}
    (stage.directory / death_file(1)).write_text(json.dumps(death))
    actors[1].answer.become(1)
    assert stage.nursery.ended(0) is None
    assert [bool(actor.ended) for actor in actors] == [True, False, True]
    assert [stage.nursery.ended(0) for _ in range(2)] == [None, 1]
    (end,) = process_ends(stage.directory)
    assert (end.rank, end.exit_code, end.at_seconds) == (1, -11, 5.0)


def test_dead_actor_is_a_dead_rank_and_replaced(stage: Stage) -> None:
    actors = stage.begin()
    actors[0].answer.become(RayError("The actor died\nbecause of a worker crash"))
    codes = [stage.nursery.ended(0) for _ in actors]
    assert codes == [None, None, 1]
    (end,) = process_ends(stage.directory)
    assert (end.rank, end.exit_code) == (0, -signal.SIGKILL)
    log = (stage.directory / AGENT_LOG).read_text()
    assert log == "the actor of rank 0 has died: The actor died\n"
    stage.nursery.heal()
    assert len(stage.made) == 4
    assert stage.made[3].loaded == [(["m"], "cpu")], "as the others have"
    assert stage.ray.killed == [actors[0]]


def test_actor_that_died_between_trials_is_replaced(stage: Stage) -> None:
    actors = stage.begin()
    actors[2].alive = False
    stage.nursery.heal()
    assert len(stage.made) == 4
    assert stage.made[3].loaded == [(["m"], "cpu")]


def test_reaping_ends_all(stage: Stage) -> None:
    actors = stage.begin()
    assert stage.nursery.reap() == -signal.SIGKILL
    assert [actor.ended for actor in actors] == [1, 1, 1]
    assert stage.ray.killed == []
    stage.nursery.close()
    assert stage.ray.killed == actors


@pytest.mark.parametrize(
    ("cause", "kind", "said"),
    [
        (InputError("device", "none", "cpu"), InputError, "device: none; cpu"),
        (KeyError("x"), ShardmarkError, "an actor of a rank: 'x'"),
    ],
)
def test_errors_of_actors_are_the_users_where_they_are(
    stage: Stage, cause: Exception, kind: type[Exception], said: str
) -> None:
    actors = stage.begin()
    actors[0].machine_is = RayTaskError(cause)
    with pytest.raises(kind) as caught:
        stage.nursery.machine("cpu")
    assert str(caught.value) == said


def test_judge_finds_the_testimony_of_other_machines(stage: Stage, tmp_path: Path) -> None:
    """Their folders are the controller's, and not there."""
    controller = tmp_path / "controller"
    cells = [controller / name for name in ("a", "b")]
    for cell in cells:
        (cell / "deep").mkdir(parents=True)
        (cell / "deep" / "file").write_text(f"of {cell.name}")
        (cell / "empty").touch()
    (controller / "cells.json").write_text(json.dumps([str(cell) for cell in cells]))
    ray_judging.send_testimony(controller, ray_judging.Testimony(stage.kept).keep)
    stage.nursery.load(["m"], "cpu")
    stage.nursery.begin(stage.directory, "judge", {})
    listed = [Path(one) for one in json.loads((stage.directory / "cells.json").read_text())]
    assert [(one / "deep" / "file").read_text() for one in listed] == ["of a", "of b"]
    assert all((one / "empty").read_text() == "" for one in listed)
    assert [len(actor.ran) for actor in stage.made] == [1, 0, 0], "one process judges"


def test_ranks_meet_at_node_0_and_are_clients_of_its_store() -> None:
    place = Place(node=1, endpoint="[fd00::1]:4711", address="fd00::2")
    told = rank_variables((2, 5), place, world_size=6)
    assert told[1] == {
        "MASTER_ADDR": "fd00::1",
        "MASTER_PORT": "4711",
        "WORLD_SIZE": "6",
        "LOCAL_WORLD_SIZE": "2",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "RANK": "5",
        "LOCAL_RANK": "1",
    }
