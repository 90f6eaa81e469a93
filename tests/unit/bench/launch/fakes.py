"""An engine without processes, and a listener that remembers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from shardmark.base.files.run_files import rank_file, rank_steps_file
from shardmark.base.machine import Machine
from shardmark.base.results.schema import RankRecord, TrialResult
from shardmark.bench.launch.listener import ProgressListener, TrialProgress
from shardmark.bench.launch.outcome import Ending, ProcessEnd
from shardmark.experiment.experiment import Experiment
from shardmark.experiment.load import from_mapping
from shardmark.experiment.matrix import LeftOut, expand
from shardmark.ranks.measure.step.progress import ProgressWriter
from shardmark.ranks.trial import Trial
from tests.golden.invented import invented_rank

CPU = Machine(device_type="cpu", device_count=0, cores=2)


def ending(
    status: Literal["exited", "timed_out", "interrupted"] = "exited",
    code: int = 0,
    failures: Sequence[tuple[int, int, float]] = (),
    oom_kills: int = 0,
) -> Ending:
    """`failures` are rank, exit code and time."""
    ends = tuple(ProcessEnd(rank=r, exit_code=c, at_seconds=at) for r, c, at in failures)
    return Ending(status=status, agent_exit_code=code, failures=ends, oom_kills=oom_kills)


FINE = ending()
FAILED = ending(code=1)
TIMED_OUT = ending("timed_out", -9)
INTERRUPTED = ending("interrupted", -9)

MAPPING: dict[str, Any] = {
    "name": "faked",
    "workload": {"name": "classification", "model": "resnet18", "dataset": "digits"},
    "recipe": {"global_batch": 8, "steps": 4},
    "matrix": {"strategy": ["single", "ddp"]},
    "measure": {"warmup_steps": 1, "repeats": 1, "sample_seconds": 10, "verify": False},
    "device": "cpu",
}


def experiment(*overrides: str) -> Experiment:
    return from_mapping(MAPPING, overrides)


def trial_of(strategy: str, *overrides: str, device: Literal["cpu", "cuda"] = "cpu") -> Trial:
    """The only trial of an experiment with that strategy alone."""
    (trial,) = expand(experiment(f"matrix.strategy=[{strategy}]", *overrides), device).trials
    return trial


class FakeEngine:
    """Leaves what ranks would leave; `ends` says how a trial ends, by its strategy."""

    samples = False

    def __init__(
        self,
        ends: Mapping[str, Ending | BaseException] | None = None,
        machine: Machine = CPU,
        nodes: int = 1,
    ) -> None:
        self.ends = dict(ends or {})
        self.calls: list[str] = []
        self.ran: list[Trial] = []
        self.loaded: list[str] = []
        self.prepare: Callable[[Trial], None] = lambda trial: None  # noqa: ARG005
        self.on_run: Callable[[Path], None] = lambda directory: None  # noqa: ARG005
        self.leave_files: Callable[[Path, int], None] = leave_files
        """Writes the files of ranks that end well."""
        self.on_links: Callable[[Path], Ending] = lambda directory: FINE  # noqa: ARG005
        """Writes the files of ranks that measure links: by default none."""
        self._machine = machine
        self.nodes = nodes

    def machine(self, device: str) -> Machine:
        self.calls.append(f"machine {device}")
        return self._machine

    def environments(self) -> list[dict[str, Any]]:
        return [{"node": node, "host": f"host-{node}"} for node in range(self.nodes)][1:]

    def unavailable_reason(self, nodes: int) -> str | None:
        return None if nodes <= self.nodes else f"{nodes} nodes are asked for"

    def load(self, modules: Sequence[str], device_type: str) -> None:
        self.calls.append(f"load {device_type}")
        self.loaded = list(modules)

    def run(
        self,
        directory: Path,
        *,
        trial_seconds: float,
        on_tick: Callable[[], None],
        task: str = "measure",
    ) -> Ending:
        if task == "links":
            return self.on_links(directory)
        assert task == "measure", "the runs of these tests are not verified"
        trial = Trial.model_validate_json((directory / "trial.json").read_text())
        assert trial_seconds == trial.limits.trial_seconds
        self.calls.append(f"run {trial.strategy.name}")
        self.ran.append(trial)
        on_tick()
        end = self.ends.get(trial.strategy.name, FINE)
        if isinstance(end, BaseException):
            raise end
        self.on_run(directory)
        if end == FINE:
            self.leave_files(directory, trial.world_size)
        on_tick()
        return end

    def close(self) -> None:
        self.calls.append("close")

    @property
    def names(self) -> list[str]:
        """Strategies whose trials were run, in any order."""
        return sorted(trial.strategy.name for trial in self.ran)


def leave_files(directory: Path, ranks: int, **changes: Any) -> None:
    """A record, a step and a progress file of every rank, and its output."""
    for rank in range(ranks):
        record = RankRecord.model_validate(invented_rank(rank).model_dump() | changes)
        (directory / rank_file(rank)).write_text(record.model_dump_json())
        step = {"rank": rank, "step": 5, "epoch": 0, "measured": True, "step_seconds": 0.5}
        (directory / rank_steps_file(rank)).write_text(json.dumps(step) + "\n")
        log = directory / "logs" / str(rank) / "stdout.log"
        log.parent.mkdir(parents=True)
        log.write_text("hello\n")
        with ProgressWriter.opened(directory, rank, total_steps=4) as progress:
            progress.stepped(3)


class RecordingListener(ProgressListener):
    """A listener that writes down what it is told."""

    def __init__(self) -> None:
        self.plans: list[tuple[int | None, int, int]] = []
        self.notes: list[str] = []
        self.started: list[tuple[int, int | None]] = []
        self.steps: list[tuple[int, int | None]] = []
        self.ended: list[tuple[int, int | None, str]] = []

    def planned(self, total: int | None, finished: int, left_out: tuple[LeftOut, ...]) -> None:
        self.plans.append((total, finished, len(left_out)))

    def note(self, text: str) -> None:
        self.notes.append(text)

    def doing(self, text: str) -> None:
        self.notes.append(text)

    def trial_started(self, number: int, total: int | None, trial: Trial) -> None:
        assert trial.strategy.name
        self.started.append((number, total))

    def trial_stepped(self, progress: TrialProgress) -> None:
        self.steps.append((progress.steps, progress.total_steps))

    def trial_ended(self, number: int, total: int | None, result: TrialResult) -> None:
        self.ended.append((number, total, str(result.outcome)))
