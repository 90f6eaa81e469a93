"""Ranks that die: the trial goes on from its last checkpoint as if nothing had been."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shardmark.analysis.compare.comparison import compare
from shardmark.config.experiment import Experiment
from shardmark.config.load import from_mapping
from shardmark.core.run_files import TRIAL_FILE
from shardmark.launch.controller import run_experiment
from shardmark.report.table.notes import notes_of
from shardmark.results.schema import Outcome, TrialResult
from shardmark.results.store import StoredRun, load_run
from shardmark.strategies import STRATEGIES
from tests.distributed.dying import Death, plan
from tests.distributed.experiments import experiment
from tests.kept_engine import KeptEngine
from tests.listening import Address, is_loopback, of_this_process

pytestmark = pytest.mark.timeout(1200)

STEPS, EVERY, DIES_AT_STEP = 10, 3, 8
RESUMED_STEP = 6
LOCAL = ("local-sgd", "diloco")
EQUAL = [
    *("single", "ddp", "zro", "fsdp", "fsdp1", "zero-1", "zero-3", "ps-sync"),
    *(*LOCAL, "fsdp-hybrid", "zero-2"),
]
ROUNDS = [{"name": name, "period_steps": EVERY} for name in LOCAL]
MATRICES: tuple[dict[str, Any], ...] = (
    {"strategy": [*(name for name in EQUAL[:-2] if name not in LOCAL), *ROUNDS, "ps-async"]},
    {"strategy": ["fsdp-hybrid"], "world_size": [4]},
    {"strategy": [{"name": "zero-2", "precision": "bf16"}]},
)
UNDISTURBED = {"strategy": ["fsdp-grad-op", "zero-0", "ps-bounded"]}
"""Whose trials nobody disturbs, for all that each strategy's trials have in common."""
LAYERED = ("tp", "pp", "ulysses", "fsdp-ulysses", "fsdp-tp", "ddp-pp", "fsdp-pp", "fsdp-tp-pp")
LAYERED_MATRICES: tuple[dict[str, Any], ...] = (
    {"strategy": [*LAYERED[:4]]},
    {"strategy": [*LAYERED[4:]], "world_size": [4]},
)
"""These need a model that says how it is divided."""
LAYERS = {"name": "own", "task": "tests.distributed.dying:Layers"}
DEATHS = (
    Death(rank=0, processes=1, victim=0, at_step=DIES_AT_STEP),
    Death(rank=1, processes=2, victim=1, at_step=DIES_AT_STEP),
    Death(rank=3, processes=4, victim=3, at_step=DIES_AT_STEP),
    # With parameter servers three processes: the server, which `ps-async` cannot miss either.
    Death(rank=1, processes=3, victim=2, at_step=DIES_AT_STEP),
)
KILLED = "was ended by SIGKILL"


def dying(
    matrix: dict[str, Any], *others: str, workload: dict[str, Any] | None = None, **limits: Any
) -> Experiment:
    asked = experiment(
        "dying:dying",
        *others,
        recipe={
            "steps": STEPS,
            # Its state has counters, and a rate of its own for each step.
            "optimizer": {"name": "adamw", "lr": 0.01},
            "schedule": {"name": "cosine"},
        },
        matrix=matrix,
        measure={"evaluate": "end", "probe": False},
        limits=limits,
    )
    return from_mapping(asked if workload is None else asked | {"workload": workload})


def run(
    out: Path, engine: KeptEngine, matrices: tuple[dict[str, Any], ...] = MATRICES, **more: Any
) -> StoredRun:
    """All matrices in one folder."""
    for matrix in matrices:
        run_experiment(dying(matrix, **more), out, engine=engine)
    return load_run(out)


Runs = tuple[StoredRun, StoredRun]


Listened = dict[str, set[Address]]


@pytest.fixture(scope="module")
def listened(kept_engine: KeptEngine) -> Iterator[Listened]:
    """Where each strategy's trials listen, while they run."""
    addresses: Listened = defaultdict(set)
    run_trial = kept_engine.run

    def watched(directory: Path, *, on_tick: Callable[[], None], **more: Any) -> Any:
        strategy = json.loads((directory / TRIAL_FILE).read_text())["strategy"]["name"]

        def look() -> None:
            addresses[strategy] |= of_this_process()
            on_tick()

        return run_trial(directory, on_tick=look, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kept_engine, "run", watched)
        yield addresses


@pytest.fixture(scope="module")
def runs(
    tmp_path_factory: pytest.TempPathFactory,
    kept_engine: KeptEngine,
    listened: Listened,  # noqa: ARG001  (it looks on)
) -> Runs:
    """The same trials undisturbed, and each with a death in its eighth step."""
    folder = tmp_path_factory.mktemp("restarts")
    plan(kept_engine.deaths, folder, *DEATHS)
    restarted = run(folder / "restarted", kept_engine, max_restarts=2, checkpoint_steps=EVERY)
    kept_engine.deaths.unlink()
    matrices = (*MATRICES, UNDISTURBED)
    return run(folder / "undisturbed", kept_engine, matrices), restarted


@pytest.fixture(scope="module")
def layered(
    tmp_path_factory: pytest.TempPathFactory,
    kept_engine: KeptEngine,
    listened: Listened,  # noqa: ARG001  (it looks on)
) -> Runs:
    """The same of divided layers and stages."""
    folder = tmp_path_factory.mktemp("layered")
    plan(kept_engine.deaths, folder, *DEATHS)
    asked: dict[str, Any] = {"matrices": LAYERED_MATRICES, "workload": LAYERS}
    limits: dict[str, Any] = {"max_restarts": 2, "checkpoint_steps": EVERY}
    restarted = run(folder / "restarted", kept_engine, **asked, **limits)
    kept_engine.deaths.unlink()
    return run(folder / "undisturbed", kept_engine, **asked), restarted


@pytest.fixture
def both(
    request: pytest.FixtureRequest,
    strategy: str,
    kept_engine: KeptEngine,  # noqa: ARG001  (there before the test looks what it leaves behind)
) -> Runs:
    """The strategy's trial undisturbed, and with a death."""
    made: Runs = request.getfixturevalue("layered" if strategy in LAYERED else "runs")
    return made


def of(run: StoredRun, strategy: str) -> TrialResult:
    (trial,) = (trial for trial in run.trials if trial.strategy == strategy)
    assert trial.outcome is Outcome.OK, trial.failure
    return trial


def steps(run: StoredRun, strategy: str) -> list[dict[str, Any]]:
    file = run.path / "trials" / of(run, strategy).id / "steps.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.parametrize("strategy", [*EQUAL, *LAYERED])
def test_resumed_training_is_the_undisturbed_one_to_the_last_bit(both: Runs, strategy: str) -> None:
    same = ("rank", "step", "epoch", "loss", "learning_rate", "samples")
    told = [[[line[key] for key in same] for line in steps(run, strategy)] for run in both]
    assert told[0] == told[1], "each step once, with the same loss"
    for before, after in zip(*(of(run, strategy).ranks for run in both), strict=True):
        for name in (
            *("final_weights_sha256", "initial_weights_sha256", "sample_order_sha256"),
            "samples_total",
        ):
            assert getattr(before, name) == getattr(after, name), name
        qualities = [[epoch.quality for epoch in rank.epochs] for rank in (before, after)]
        assert qualities[0] == qualities[1]
        exchanges = [rank.exchange for rank in (before, after) if rank.exchange is not None]
        counts = [(told.pushes, told.updates, told.sent_bytes) for told in exchanges]
        assert counts == counts[:1] * len(counts)


@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name != "dp"])
def test_nobody_listens_but_on_loopback(
    runs: Runs, layered: Runs, both: Runs, listened: Listened, strategy: str
) -> None:
    """Nor when ranks die and all are started anew."""
    assert both in (runs, layered)
    assert of(both[0], strategy).outcome is Outcome.OK
    assert all(map(is_loopback, listened[strategy])), listened[strategy]
    # gloo connects ranks by TCP, for moments that may lie between two looks at a short trial.
    assert sum(map(bool, listened.values())) > len(STRATEGIES) / 2


@pytest.mark.parametrize("strategy", [*EQUAL, *LAYERED, "ps-async"])
def test_a_restart_is_told_and_measured(both: Runs, strategy: str) -> None:
    trial = of(both[1], strategy)
    (restart,) = trial.restarts
    assert restart.restart == 1
    assert KILLED in restart.reason or "the parameter server" in restart.reason
    values = {name: summary.value for name, summary in trial.metrics.items() if summary is not None}
    assert values["restarts"] == 1
    assert 0 < values["lost_seconds"] < trial.total_seconds
    assert 0 < values["checkpoint_seconds"] < trial.total_seconds
    assert values["checkpoint_bytes"] > 1000
    workers = [rank for rank in trial.ranks if rank.role == "worker"]
    resumed = {resume.step for rank in workers for resume in rank.resumes}
    # Without a barrier, on a busy machine, the other worker may not have come to the sixth step.
    assert resumed == {RESUMED_STEP} or (strategy == "ps-async" and resumed == {EVERY})
    assert {checkpoint.step for checkpoint in trial.ranks[0].checkpoints} == {3, 6, 9}
    files = {file.name for file in (both[1].path / "trials" / trial.id).iterdir()}
    assert files <= {"result.json", "steps.jsonl", "samples.jsonl", "log.txt"}


def test_processes_that_were_started_anew_are_sampled(runs: Runs) -> None:
    """One at least: steps of milliseconds may be over before the sampler has seen a process."""
    trials = runs[1].trials
    for name in ("peak_rss_bytes", "cpu_percent", "context_switches"):
        sampled = [trial for trial in trials if trial.metrics.get(name) is not None]
        assert sampled, [trial.missing.get(name) for trial in trials]


def test_windows_have_neither_checkpoints_nor_cold_steps(runs: Runs) -> None:
    (rank, _) = of(runs[1], "ddp").ranks
    spans = [(window.first_step, window.end_step) for window in rank.windows]
    assert spans == [(1, 3), (3, 6), (7, 9), (9, 10)]
    measured = [line["step"] for line in steps(runs[1], "ddp")[:STEPS] if line["measured"]]
    assert measured == [step for step in range(STEPS) if step not in (0, RESUMED_STEP)]


def test_what_ranks_hold_alike_is_written_once(runs: Runs) -> None:
    replicas, shards = (
        [rank.checkpoints[0].written_bytes for rank in of(runs[1], name).ranks]
        for name in ("ddp", "fsdp")
    )
    assert replicas[0] > 2 * replicas[1]
    assert 0.8 < shards[0] / shards[1] < 1.25


def test_no_update_of_an_asynchronous_server_is_lost_or_made_twice(runs: Runs) -> None:
    server = of(runs[1], "ps-async").ranks[2]
    assert server.exchange is not None
    assert server.exchange.updates == 2 * STEPS
    assert sum(server.exchange.staleness.values()) == 2 * STEPS
    assert len(steps(runs[1], "ps-async")) == 2 * STEPS


def test_the_table_says_so_and_nothing_of_undisturbed_trials(runs: Runs) -> None:
    trial = of(runs[0], "ddp")
    assert trial.restarts == ()
    values = [trial.metrics[name] for name in ("restarts", "lost_seconds")]
    assert [value.value for value in values if value is not None] == [0, 0]
    assert trial.missing["checkpoint_bytes"] == "no checkpoint was written"
    texts = [note.text for note in notes_of(compare([runs[1]]))]
    (note,) = (text for text in texts if text.startswith("RESTARTED: ddp"))
    assert "1 time, lost" in note


def test_what_happens_again_and_again_fails_after_the_restarts(
    tmp_path: Path, kept_engine: KeptEngine
) -> None:
    """Running out of memory is not tried again."""
    again = Death(rank=1, processes=2, victim=1, at_step=1, times=9)
    plan(kept_engine.deaths, tmp_path, again)
    limits: dict[str, Any] = {"max_restarts": 1, "checkpoint_steps": EVERY}
    twice = dying({}, "misbehaving:has_no_memory", **limits)
    out = run_experiment(twice, tmp_path / "run", engine=kept_engine)
    kept_engine.deaths.unlink()
    ended = {
        str(trial.trial["workload"]["model"]).rpartition(":")[2]: trial
        for trial in load_run(out).trials
    }
    reasons = {name: t.failure.reason for name, t in ended.items() if t.failure is not None}
    assert {name: trial.outcome for name, trial in ended.items()} == {
        "dying": Outcome.FAILED,
        "has_no_memory": Outcome.OUT_OF_MEMORY,
    }
    assert reasons["dying"] == f"rank 1 {KILLED} (after 1 restart)"
    assert [restart.reason for restart in ended["dying"].restarts] == [f"rank 1 {KILLED}"]
    assert ended["has_no_memory"].restarts == ()
