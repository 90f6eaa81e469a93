"""Scripts that know nothing of Shardmark, timed on real ranks."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from shardmark.base.results.schema import Outcome, TrialResult
from shardmark.base.results.store import StoredRun, load_run
from shardmark.bench.analysis.compare.comparison import compare
from shardmark.bench.launch.session import run_experiment
from shardmark.bench.report.answers.answers import answers
from shardmark.experiment.load import from_mapping
from tests import present
from tests.distributed.experiments import experiment
from tests.distributed.test_two_nodes import TWO_NODES
from tests.kept_engine import KeptEngine
from tests.unit.bench.launch.fakes import RecordingListener

SCRIPT = Path(__file__).with_name("plain_script.py")
WARMUP_STEPS, STEPS = 2, 8


def timed(engine: KeptEngine, out: Path, variants: dict[str, str], **changes: Any) -> StoredRun:
    base = experiment()
    mapping = {key: base[key] for key in ("name", "limits", "device")} | {
        "workload": {"name": "script", "command": str(SCRIPT), **changes.pop("workload", {})},
        "recipe": {"steps": STEPS},
        "measure": base["measure"] | {"warmup_steps": WARMUP_STEPS, "verify": False},
        "matrix": {"variant": variants, "world_size": changes.pop("ranks", [2])},
    }
    return load_run(run_experiment(from_mapping(mapping | changes), out, engine=engine))


def test_the_trials_of_a_race_take_turns(kept_engine: KeptEngine, tmp_path: Path) -> None:
    base = experiment()["measure"]
    run = timed(
        kept_engine,
        tmp_path / "run",
        {"ddp": "--strategy ddp", "fsdp": "--strategy fsdp"},
        measure=base | {
            "warmup_steps": WARMUP_STEPS, "verify": False, "window_seconds": 0.3,
            "repeats": {"at_least": 2, "at_most": 2, "margin": 0.01},
        },
    )  # fmt: skip
    assert [trial.outcome for trial in run.trials] == [Outcome.OK] * 4
    for repeat in range(2):
        beside = [trial for trial in run.trials if trial.repeat == repeat]
        measured = [rank.windows[0].window_seconds for t in beside for rank in t.ranks[:1]]
        together_seconds = sum(trial.total_seconds for trial in beside)
        assert sum(measured) < together_seconds, "a clock goes on between turns"


OUTSIDE, WAITS = "outside of its process group", "the script waits for data"
WITHOUT_TURNS = {
    "rank": ("os.setsid()", OUTSIDE),
    "child": ("subprocess.Popen(['sleep', '1000'], start_new_session=True)", OUTSIDE),
    "orphan": ("subprocess.run('setsid sleep 1000 &', shell=True)", OUTSIDE),
    "workers": (
        """
from functools import partialmethod
from torch.utils.data import DataLoader, TensorDataset
get = TensorDataset.__getitem__
TensorDataset.__getitem__ = lambda self, index: (time.sleep(0.01), get(self, index))[1]
DataLoader.__init__ = partialmethod(DataLoader.__init__, num_workers=2)
""",
        WAITS,
    ),
}


@pytest.mark.parametrize("what", WITHOUT_TURNS)
def test_scripts_that_go_on_while_they_are_stopped_take_no_turns(
    kept_engine: KeptEngine, tmp_path: Path, what: str
) -> None:
    lines, reason = WITHOUT_TURNS[what]
    script = tmp_path / "train.py"
    run = f"runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
    script.write_text(f"import os, runpy, subprocess, time\n{lines}\n{run}\n")
    base = experiment()["measure"]
    listener = RecordingListener()
    out = run_experiment(
        from_mapping({
            "name": "leaving", "device": "cpu",
            "matrix": {"variant": {"one": "", "other": "--steps=999"}},
            "workload": {"name": "script", "command": str(script)},
            "measure": base | {
                "verify": False, "window_seconds": 0.3,
                "repeats": {"at_least": 2, "at_most": 2, "margin": 0.01},
            },
        }),
        tmp_path / "run", engine=kept_engine, listener=listener,
    )  # fmt: skip
    assert any(reason in note for note in listener.notes)
    assert [trial.outcome for trial in load_run(out).trials] == [Outcome.OK] * 4


def value(trial: TrialResult, metric: str) -> float:
    summary = trial.metrics[metric]
    assert summary is not None, trial.missing[metric]
    return summary.value


def test_variants_are_compared_like_strategies(kept_engine: KeptEngine, tmp_path: Path) -> None:
    note = tmp_path / "note"
    variants = {
        "ddp": f"--strategy ddp --note {note}",
        "fsdp": "--strategy fsdp",
        "broken": "--fail-at 3",
    }
    run = timed(kept_engine, tmp_path / "run", variants, workload={"writes_are_fine": True})
    trials = {trial.strategy: trial for trial in run.trials}
    assert {name: trial.outcome for name, trial in trials.items()} == {
        "ddp": Outcome.OK,
        "fsdp": Outcome.OK,
        "broken": Outcome.FAILED,
    }
    for name in ("ddp", "fsdp"):
        trial = trials[name]
        assert value(trial, "measured_steps") == STEPS - WARMUP_STEPS
        assert [rank.samples for rank in trial.ranks] == [8 * (STEPS - WARMUP_STEPS)] * 2
        slowest = max(rank.windows[0].window_seconds for rank in trial.ranks)
        rate = 2 * 8 * (STEPS - WARMUP_STEPS) / slowest
        assert value(trial, "samples_per_second") == pytest.approx(rate)
        for metric in ("step_seconds", "data_seconds", "startup_seconds", "peak_memory_bytes"):
            assert value(trial, metric) > 0
        assert value(trial, "exposed_communication_seconds") >= 0
        assert value(trial, "train_loss") == pytest.approx(printed_loss(run, trial), rel=1e-5)
    kinds = {name: calls(trials[name]) for name in ("ddp", "fsdp")}
    assert kinds["ddp"] == {"all_reduce": 1}
    assert kinds["fsdp"].keys() >= {"all_gather", "reduce_scatter"}
    assert phases(trials["ddp"]) == {("backward", "all_reduce")}
    gathered = {("forward", "all_gather"), ("backward", "reduce_scatter")}
    assert phases(trials["fsdp"]) >= gathered
    assert trials["ddp"].layout.processes == 2
    # The script saw what torchrun would have given it, and ended through its `finally`.
    assert [Path(f"{note}-{rank}").read_text().split()[:4] for rank in range(2)] == [
        [str(rank), "2", str(SCRIPT), str(SCRIPT.parent)] for rank in range(2)
    ]
    failure = present(trials["broken"].failure)
    assert re.fullmatch(
        r"rank \d: ValueError: the mistake of the script \(plain_script.py:\d+\)", failure.reason
    )
    log = (run.path / "trials" / trials["broken"].id / "log.txt").read_text()
    assert "plain_script.py" in log
    assert "src/shardmark" not in log
    fastest = next(a for a in answers(compare([run])) if a.question == "fastest")
    disturbed = fastest.text == "not decided: the times are disturbed"  # other programs ran
    assert "samples/s" in fastest.text or disturbed


def calls(trial: TrialResult) -> dict[str, float]:
    probe = present(trial.ranks[0].probe)
    return {kind: counted.calls for kind, counted in present(probe.collectives).items()}


def phases(trial: TrialResult) -> set[tuple[str, str]]:
    probe = present(trial.ranks[0].probe)
    by_phase = probe.collectives_by_phase or {}
    return {(phase, kind) for phase, kinds in by_phase.items() for kind in kinds}


def printed_loss(run: StoredRun, trial: TrialResult) -> float:
    """The mean of the losses that the ranks print in the recorded steps."""
    log = (run.path / "trials" / trial.id / "log.txt").read_text()
    losses = [float(loss) for step, loss in re.findall(r"step (\d+) loss (\S+)", log)
              if int(step) < STEPS]  # fmt: skip
    assert len(losses) == 2 * STEPS
    return sum(losses) / len(losses)


ENDS = {
    "late": ("--steps 5", Outcome.OK, ""),
    "early": ("--steps 2", Outcome.FAILED, "ended after 2 optimizer steps, which are warm-up"),
    "never": ("--steps 0", Outcome.FAILED, "took no optimizer step"),
    "refused": ("--exit-code 3 --steps 3", Outcome.FAILED, "exit code 3: about to leave"),
    "wrong": ("--nope", Outcome.FAILED, "error: unrecognized arguments: --nope"),
}


def test_ends_of_scripts(kept_engine: KeptEngine, tmp_path: Path) -> None:
    """A script that ends by itself is measured as far as it came, or says why it was not."""
    variants = {name: arguments for name, (arguments, *_) in ENDS.items()}
    run = timed(kept_engine, tmp_path / "run", variants, ranks=[1])
    for trial in run.trials:
        _, outcome, reason = ENDS[trial.strategy]
        assert trial.outcome is outcome
        assert reason in (trial.failure.reason if trial.failure else "")
    late = next(trial for trial in run.trials if trial.strategy == "late")
    assert value(late, "measured_steps") == 3
    assert "ended before it took untimed steps" in late.missing["collective_calls"]


def test_until_its_exit(kept_engine: KeptEngine, tmp_path: Path) -> None:
    run = timed(
        kept_engine,
        tmp_path / "run",
        {"plain": f"--steps 20 --note {tmp_path / 'note'}"},
        workload={"until_exit": True, "writes_are_fine": True},
        recipe={},
    )
    (trial,) = run.trials
    assert trial.outcome is Outcome.OK
    assert value(trial, "measured_steps") == 20 - WARMUP_STEPS
    assert (tmp_path / "note-1").read_text().endswith(" 20")
    assert "ran to its end" in trial.missing["collective_calls"]
    lines = (run.path / "trials" / trial.id / "steps.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines]
    assert sum(step["measured"] for step in steps) == 2 * (20 - WARMUP_STEPS)


BARE = """
import torch

weight = torch.ones(3, requires_grad=True)
optimizer = torch.optim.SGD([weight], 0.1)
for _ in range(100):
    (weight * weight).sum().backward()
    optimizer.step()
"""


CATCHING = """
import torch

weight = torch.ones(3, requires_grad=True)
optimizer = torch.optim.SGD([weight], 0.1)
while True:
    try:
        (weight * weight).sum().backward()
        optimizer.step()
    except:
        print("it goes on")
"""


def test_the_end_of_a_script_that_catches_every_exception(
    kept_engine: KeptEngine, tmp_path: Path
) -> None:
    script = tmp_path / "catching.py"
    script.write_text(CATCHING)
    run = timed(kept_engine, tmp_path / "run", {"one": str(script)}, workload={"command": ""})
    (trial,) = run.trials
    assert trial.outcome is Outcome.OK
    assert value(trial, "measured_steps") == STEPS - WARMUP_STEPS
    assert "collective_calls" not in trial.missing
    assert "it goes on" in (run.path / "trials" / trial.id / "log.txt").read_text()


def test_steps_count_where_samples_cannot(kept_engine: KeptEngine, tmp_path: Path) -> None:
    """Such a row says so and competes with no other; the batch of the others grows with ranks."""
    bare = tmp_path / "bare.py"
    bare.write_text(BARE)
    variants = {"bare": str(bare), "plain": str(SCRIPT)}
    run = timed(kept_engine, tmp_path / "run", variants, ranks=[1, 2], workload={"command": ""})
    comparison = compare([run])
    rows = {(row.strategy, row.world_size): row for row in comparison.rows}
    for trial in run.trials:
        counted = STEPS - WARMUP_STEPS
        samples = counted if trial.strategy == "bare" else counted * 8 * trial.world_size
        assert sum(rank.samples for rank in trial.ranks) == samples
    assert rows["bare", 2].comparable(rows["bare", 1])
    assert not rows["bare", 2].comparable(rows["plain", 2])
    # A busy machine adds a caution of its own before this one.
    cautions = [answer.text for answer in answers(comparison) if answer.question == "caution"]
    assert any("bare" in text and "a step counts as one sample" in text for text in cautions)
    assert {key: row.weak_scaling for key, row in rows.items()} == {
        ("bare", 1): False,
        ("bare", 2): False,
        ("plain", 1): True,
        ("plain", 2): True,
    }


def test_ranks_measure_the_same_steps_where_seconds_decide(
    kept_engine: KeptEngine, tmp_path: Path
) -> None:
    # Long enough for a second step on a machine that others keep busy.
    seconds = {"warmup_seconds": 2.0, "window_seconds": 0.5}
    measure = experiment()["measure"] | {"warmup_steps": 1} | seconds | {"verify": False}
    run = timed(kept_engine, tmp_path / "run", {"plain": "--steps 100000"}, measure=measure)
    (trial,) = run.trials
    assert trial.outcome is Outcome.OK
    first, second = (
        [(window.first_step, window.end_step) for window in rank.windows] for rank in trial.ranks
    )
    assert first == second
    assert sum(window.window_seconds for window in trial.ranks[0].windows) >= 0.5
    assert first[0][0] > 1


def test_a_script_on_two_nodes(tmp_path: Path) -> None:
    """The ranks meet at the store of the first node."""
    base = experiment()
    mapping = {key: base[key] for key in ("name", "measure", "limits", "device")} | {
        "workload": {"name": "script", "command": str(SCRIPT)},
        "recipe": {"steps": STEPS},
        "matrix": {"variant": {"ddp": ""}, "world_size": [2]},
        "placement": {"nodes": 2},
        "engine": TWO_NODES,
    }
    mapping["measure"] |= {"link_seconds": 0}
    (trial,) = load_run(run_experiment(from_mapping(mapping), tmp_path / "run")).trials
    assert trial.outcome is Outcome.OK
    assert [rank.node for rank in trial.ranks] == [0, 1]
    assert calls(trial) == {"all_reduce": 1}
