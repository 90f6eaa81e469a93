"""Trials with servers, whose workers are unequal or die while the others train on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shardmark.core.run_files import LOST_FILE, rank_file
from shardmark.launch.outcome import Ending
from shardmark.launch.trial import TrialRunner
from shardmark.measure.step.progress import ProgressWriter
from shardmark.results.schema import Outcome, RankRecord, TrialResult
from shardmark.results.store import RunFolder
from tests.golden.invented import invented_rank
from tests.unit.launch.fakes import CPU, FakeEngine, Remembers
from tests.unit.launch.test_trial import trial_of


class ServedEngine(FakeEngine):
    """Two workers and a server; the first worker dies after its first step."""

    def run(self, directory: Path, **options: Any) -> Ending:
        server = RankRecord.model_validate(invented_rank(2).model_dump() | {"role": "server"})
        (directory / rank_file(2)).write_text(server.model_dump_json())
        ending = super().run(directory, **options)
        whole = invented_rank(1).model_copy(update={"steps_per_epoch": 2})
        (directory / rank_file(1)).write_text(whole.model_dump_json())
        early = invented_rank(0).model_copy(
            update={"steps_per_epoch": None, "windows": (), "samples": 0, "epochs": ()}
        )
        (directory / rank_file(0)).write_text(early.model_dump_json())
        (directory / LOST_FILE.format(0)).write_text("was ended by SIGKILL")
        return ending


def run(tmp_path: Path, engine: FakeEngine, told: Remembers) -> TrialResult:
    folder = RunFolder.create(tmp_path / "run")
    runner = TrialRunner(engine=engine, machine=CPU, folder=folder, listener=told)
    return runner.run(trial_of("ps-async"), order=0)


def test_trial_goes_on_without_its_first_worker(tmp_path: Path) -> None:
    result = run(tmp_path, ServedEngine(), Remembers())
    assert (result.outcome, result.failure) == (Outcome.OK, None)
    assert [rank.lost for rank in result.ranks] == ["was ended by SIGKILL", None, None]
    assert result.metrics["samples_per_second"] is not None
    reason = result.missing.get("epoch_seconds", "")
    assert "is not known" not in reason, "the others know how long an epoch is"


def test_progress_is_that_of_the_furthest(tmp_path: Path) -> None:
    told = Remembers()

    def unequal(directory: Path) -> None:
        for rank, steps in enumerate((1, 3)):
            with ProgressWriter.opened(directory, rank, total_steps=4) as progress:
                progress.stepped(steps)

    late = Ending(how="timed_out", agent_exit_code=-9, failures=(), oom_kills=0)
    engine = FakeEngine({"ps-async": late})
    engine.on_run = unequal
    result = run(tmp_path, engine, told)
    assert told.steps == [(3, 4)]
    assert result.failure is not None
    assert result.failure.reason.endswith("rank 0 had taken 1 steps, rank 1 had taken 3 steps")
    assert result.failure.rank == 0, "the server, which takes no steps, is not waited for"
