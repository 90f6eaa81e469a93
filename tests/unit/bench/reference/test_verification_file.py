"""The cells that are verified, which of them are tried, and the verdicts on the disk."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardmark.base.errors import InputError
from shardmark.base.results.schema import RankError
from shardmark.base.results.verification import (
    CELLS_FILE,
    VERDICTS_FILE,
    VERIFICATION_FILE,
    Verdict,
    read_verification,
    write_verification,
)
from shardmark.bench.launch.input_checks import check_plan
from shardmark.bench.launch.outcome import Ending
from shardmark.bench.launch.trial_queue import cell_of
from shardmark.bench.launch.verification import (
    STEPS,
    cells_of,
    numerics_key,
    shortened,
    verification_of,
    verify_cells,
)
from shardmark.bench.reference.capture import at_constant_rate, capture_rank
from shardmark.experiment.load import load_experiment
from shardmark.experiment.matrix import expand
from shardmark.ranks.trial import Trial
from tests.unit.bench.launch.fakes import CPU, FINE, FakeEngine, RecordingListener, leave_files
from tests.unit.bench.reference.verdicts import GOOD, VERIFICATION
from tests.unit.bench.reference.verification_cases import verification_case


def trials(*overrides: str) -> tuple[Trial, ...]:
    once = () if any("repeats" in change for change in overrides) else ("measure.repeats=1",)
    return tuple(expand(load_experiment("quickstart", (*overrides, *once)), "cpu").trials)


def test_verdicts_survive_the_file_and_are_found_by_their_cell(tmp_path: Path) -> None:
    made = VERIFICATION.model_copy(
        update={"verdicts": (verification_case().verdict_on_run(), *VERIFICATION.verdicts)}
    )
    write_verification(tmp_path, made)
    assert [path.name for path in tmp_path.iterdir()] == [VERIFICATION_FILE]
    stored = read_verification(tmp_path)
    assert stored == made
    assert stored.verdict_of("2" * 12) == stored.verdicts[2]
    assert stored.verdict_of("nonsense") is None
    assert [verdict.worst for verdict in stored.verdicts[1:]] == [0.25, 900.0, None]


WHOLE = VERIFICATION.model_dump_json().encode()


@pytest.mark.parametrize(
    "content",
    [
        *(b"", WHOLE[:-2], b"[]", b"\xff\xfe", b'{"verdicts": 1}'),
        b'{"invented": 1, ' + WHOLE[1:],
    ],
)
def test_truncated_or_foreign_file_is_refused(tmp_path: Path, content: bytes) -> None:
    assert read_verification(tmp_path) is None, "no file is no verdict"
    (tmp_path / VERIFICATION_FILE).write_bytes(content)
    with pytest.raises(ValueError, match=r"JSON|found"):
        read_verification(tmp_path)


def test_a_cell_is_named_by_what_it_trains() -> None:
    (trial,) = trials("matrix.strategy=[ddp]")
    for same in (
        {"repeat": 7},
        {"id": "other"},
        {"experiment": "other"},
        {"measure": trial.measure.model_copy(update={"probe": False})},
        {"limits": trial.limits.model_copy(update={"trial_seconds": 5.0})},
    ):
        assert cell_of(trial.model_copy(update=same)) == cell_of(trial), same
    for other in (
        {"world_size": 4},
        {"device_type": "cuda"},
        {"recipe": trial.recipe.model_copy(update={"seed": 1})},
        {"workload": trial.workload.model_copy(update={"augment": "crop_flip"})},
    ):
        assert cell_of(trial.model_copy(update=other)) != cell_of(trial), other


@pytest.mark.parametrize(
    ("axis", "different"),
    [
        ("matrix.world_size=[2, 3]", False),
        ("matrix.recipe.global_batch=[12, 24]", False),
        ("matrix.recipe.optimizer.lr=[0.1, 0.2]", False),
        ("matrix.recipe.precision=[fp32, bf16]", True),
        ("matrix.recipe.gradient_clipping=[null, 1.0]", True),
        ("matrix.workload.model=[resnet18, mobilenet_v2]", True),
    ],
)
def test_sizes_do_not_change_the_numerics(axis: str, different: bool) -> None:
    batch = [] if "global_batch" in axis else ["recipe.global_batch=24"]
    first, second = cells_of(trials(*batch, "matrix.strategy=[ddp]", axis))
    assert (numerics_key(first) != numerics_key(second)) is different


class Engine(FakeEngine):
    """Captures nothing; its judge finishes so many verdicts, then ends as it is told."""

    finished = 100
    judge_ends = FINE
    then: Ending | None = None
    """The end of the next judging process, which finishes everything."""
    errors: Mapping[str, str] = {}
    """Errors that all ranks of a strategy report."""

    def run(self, directory: Path, *, task: str = "measure", **given: Any) -> Ending:
        if task == "compare":
            cells = [Path(path) for path in json.loads((directory / CELLS_FILE).read_text())]
            verdicts = [GOOD.model_copy(update={"id": cell.name}) for cell in cells]
            made = [verdict.model_dump(mode="json") for verdict in verdicts[: self.finished]]
            (directory / VERDICTS_FILE).write_text(json.dumps(made))
            given["on_tick"]()
            ended = self.judge_ends
            if self.then is not None:
                self.finished, self.judge_ends = 100, self.then
            return ended
        assert task == "capture"
        trial = Trial.model_validate_json((directory / "trial.json").read_text())
        assert trial.recipe.steps == STEPS
        self.ran.append(trial)
        end = self.ends.get(f"{trial.strategy.name} {trial.world_size}", FINE)
        if message := self.errors.get(trial.strategy.name):
            error = RankError(kind="exception", message=message, at_seconds=1.0)
            leave_files(directory, trial.world_size, error=error.model_dump())
            (log,) = directory.glob("logs/0/stdout.log")
            log.with_name("stderr.log").write_text(
                "warned\nTraceback (most recent):\n"
                '  File "a/my_model.py", line 5, in forward\n    x @ y\n'
                '  File "b/site-packages/torch/nn.py", line 7, in call\n    f(x)\n    ^^^^\n'
                f"{message}"
            )
            return FAILED
        if end == FINE:
            leave_files(directory, trial.world_size)
        assert isinstance(end, Ending)
        return end


CELLS = cells_of(
    trials("recipe.global_batch=24", "matrix.strategy=[ddp, fsdp]", "matrix.world_size=[2, 3]")
)
FAILED = Ending(status="exited", agent_exit_code=1, failures=(), oom_kills=0)


def verdicts_on(
    cells: Sequence[Trial], engine: Engine, folder: Path, listener: RecordingListener
) -> Iterator[Verdict]:
    return verify_cells(
        cells,
        engine=engine,
        machine=CPU,
        scratch=folder / "scratch",
        logs=folder / "logs",
        listener=listener,
    )


def verified(engine: Engine, folder: Path) -> list[Verdict]:
    verdicts: list[Verdict] = []
    listener = RecordingListener()
    try:
        for verdict in verdicts_on(CELLS, engine, folder, listener):
            verdicts.append(verdict)  # noqa: PERF402  (those before Ctrl-C count)
    except KeyboardInterrupt:
        verdicts.append(GOOD.model_copy(update={"id": "Ctrl-C"}))
    compared = any(note.startswith("comparing with the reference") for note in listener.notes)
    assert compared is (verdicts[0].id != "Ctrl-C")
    assert (folder / "scratch").exists() is (verdicts[-1].id == "Ctrl-C"), (
        "it is kept to go on from"
    )
    return verdicts


def test_one_cell_of_equal_numerics_is_tried(tmp_path: Path) -> None:
    engine = Engine()
    made = verification_of(CELLS, verified(engine, tmp_path))
    assert sorted(engine.names) == ["ddp", "fsdp"]
    assert {trial.world_size for trial in engine.ran} == {2}
    assert [verdict.id for verdict in made.verdicts] == [cell_of(cell) for cell in CELLS]
    tried = {v.id: v.world_size for v in made.verdicts if v.tried_as is None}
    assert set(tried.values()) == {2}
    assert {v.tried_as for v in made.verdicts if v.world_size == 3} == tried.keys()


def test_next_cell_is_tried_after_a_failure(tmp_path: Path) -> None:
    verdicts = verified(Engine({"ddp 2": FAILED}), tmp_path)
    told = {(v.world_size, v.equivalent, v.tried_as is None) for v in verdicts}
    assert told == {(2, None, True), (3, True, True), (2, True, True), (3, True, False)}


STACKS = """
Thread 0x00007f0c (most recent call first):
  File "gloo.py", line 1 in listen

Current thread 0x00007f0b (most recent call first):
  File "{}.py", line 5 in wait
  File "rank.py", line 9 in run_rank
"""


@pytest.mark.parametrize(
    ("ending", "stacks", "end"),
    [
        (
            replace(FINE, status="timed_out"),
            STACKS,
            'rank 0, rank 2: File "store.py", line 5 in wait | rank 1: File "connect.py", line 5',
        ),
        (replace(FINE, status="timed_out"), "", "[rank 2 stdout] hello"),
        (FAILED, "", "[rank 2 stdout] hello"),
    ],
    ids=["timed out", "timed out without stacks", "ended without an error"],
)
def test_output_of_ranks_that_failed_is_stored_where_the_verdict_says(
    tmp_path: Path, ending: Ending, stacks: str, end: str
) -> None:
    class Waiting(Engine):
        def run(self, directory: Path, *, task: str = "measure", **given: Any) -> Ending:
            ended = super().run(directory, task=task, **given)
            if ended is ending:
                leave_files(directory, 3)
                for rank in range(3 if stacks else 0):
                    place = "connect" if rank == 1 else "store"
                    log = directory / "logs" / str(rank) / "stderr.log"
                    log.write_text(stacks.format(place))
            return ended

    verdicts = verified(Waiting({"ddp 2": ending}), tmp_path)
    (cause,) = (verdict.cause for verdict in verdicts if verdict.equivalent is None)
    (log,) = (tmp_path / "logs").iterdir()
    assert cause is not None
    assert str(log) in cause.evidence
    assert end in cause.evidence
    assert "had not begun" not in cause.evidence, "ranks write no progress here"
    text = log.read_text()
    assert all(f"[rank {rank} stdout] hello" in text for rank in range(3))
    assert ("[rank 1 stderr] Current thread" in text) is bool(stacks)


KILLED = Ending(status="exited", agent_exit_code=-signal.SIGKILL, oom_kills=1)


@pytest.mark.parametrize(
    ("end", "told"), [(KILLED, "memory ran out"), (replace(FINE, status="timed_out"), "took over")]
)
def test_ended_reference_affects_its_cell_alone(tmp_path: Path, end: Ending, told: str) -> None:
    engine = Engine()
    engine.finished, engine.judge_ends = 0, end
    engine.then = FINE
    verdicts = verified(engine, tmp_path)
    assert sorted(v.id for v in verdicts) == sorted(map(cell_of, CELLS))
    lost = [v for v in verdicts if v.equivalent is None]
    assert len({v.strategy for v in lost}) == 1
    assert all(v.cause and told in v.cause.evidence for v in lost)


def test_verdicts_before_an_interrupt_are_stored(tmp_path: Path) -> None:
    engine = Engine()
    engine.finished = 1
    engine.judge_ends = replace(FINE, status="interrupted")
    *verdicts, last = verified(engine, tmp_path)
    assert last.id == "Ctrl-C"
    assert sorted(verdict.world_size for verdict in verdicts) == [2, 3]


def test_captures_before_an_interrupt_are_reused(tmp_path: Path) -> None:
    _, second = dict.fromkeys(cell.strategy.name for cell in CELLS)
    stopped = Engine({f"{second} 2": replace(FINE, status="interrupted")})
    assert [verdict.id for verdict in verified(stopped, tmp_path)] == ["Ctrl-C"]
    assert len(stopped.ran) == 2
    engine = Engine()
    assert len(verified(engine, tmp_path)) == len(CELLS)
    assert engine.names == [second]


def test_verified_trial_differs_in_its_length_alone() -> None:
    path = "torch.optim.lr_scheduler:OneCycleLR"
    scheduler = f"recipe.schedule={{name: own, path: '{path}', options: {{total_steps: steps}}}}"
    (trial,) = trials("matrix.strategy=[ddp]", "workload.validation_samples=300", scheduler)
    short = shortened(trial)
    assert (short.recipe.epochs, short.recipe.steps) == (None, STEPS)
    assert short.recipe.schedule.options["total_steps"] > STEPS, "it is not made for a few steps"
    assert short.workload.validation_samples == 256
    back = short.model_copy(update={"recipe": trial.recipe, "workload": trial.workload})
    assert back == trial


def test_fp16_on_a_cpu_is_verified_with_few_samples() -> None:
    """The reference of the recipe's batch would take a CPU hours."""
    asked = ("matrix.strategy=[ddp]", "recipe.precision=fp16", "recipe.gradient_accumulation=2")
    (trial,) = trials(*asked)
    assert shortened(trial).recipe.global_batch == 16
    on_gpu = trial.model_copy(update={"device_type": "cuda"})
    assert shortened(on_gpu).recipe.global_batch == trial.recipe.global_batch


def test_a_schedule_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    """Though the strategies are compared at a constant rate."""
    path = "torch.optim.lr_scheduler:ReduceLROnPlateau"
    asked = shortened(trials(f"recipe.schedule={{name: own, path: '{path}'}}")[0])
    unused: Any = None
    with pytest.raises(InputError, match="ReduceLROnPlateau fails at step 1"):
        capture_rank(asked, tmp_path, unused, unused)
    assert at_constant_rate(asked).recipe.schedule.path is None


@pytest.mark.parametrize("key", ["optimizer", "schedule"])
def test_a_misspelt_path_is_refused_before_anything_starts(key: str) -> None:
    mistake = f"recipe.{key}={{name: own, path: 'torch.optim.sgd:SDG'}}"
    with pytest.raises(InputError, match=rf"recipe\.{key}\.path.*sgd\.py has no 'SDG'"):
        check_plan(expand(load_experiment("quickstart", [mistake])))


SHAPES, UNUSED = "RuntimeError: shapes (3, 4) and (5, 6)", "RuntimeError: unused parameters"


@pytest.mark.parametrize(
    ("errors", "tried"),
    [
        ({"single": SHAPES}, ["single"]),
        ({"single": "RuntimeError: must have the same dtype, but got Float and Half"}, ["single"]),
        ({"ddp": SHAPES, "fsdp": SHAPES}, ["ddp", "fsdp"]),
        ({"ddp": UNUSED, "fsdp": SHAPES, "zero-1": "AssertionError"}, ["ddp", "fsdp", "zero-1"]),
    ],
    ids=["alone", "half", "two strategies alike", "all"],
)
def test_failure_of_the_model_ends_the_verification(
    tmp_path: Path, errors: dict[str, str], tried: list[str]
) -> None:
    engine = Engine()
    engine.errors = errors
    strategies = ["single", "zero-1"] if "single" in errors else sorted(errors)
    cells = cells_of(trials(f"matrix.strategy=[{', '.join(strategies)}]"))
    cells.sort(key=lambda cell: strategies.index(cell.strategy.name))
    verdicts = verdicts_on(cells, engine, tmp_path, RecordingListener())
    with pytest.raises(InputError, match="it fails in its first steps") as caught:
        list(verdicts)
    assert engine.names == tried
    first, head, own, line = str(caught.value).splitlines()
    assert errors[tried[-1]] in first
    assert first.endswith(
        "recipe.precision casts it" if "Half" in first else "fix it and run again"
    )
    assert "my_model.py" in own, "its own frames are enough, and the error is named once"
    assert (head, line.strip()) == ("in your code:", "x @ y")
    assert not (tmp_path / "scratch").exists()


def test_an_error_of_one_family_ends_no_other_cell(tmp_path: Path) -> None:
    """`zro` is `ddp` with another optimizer; what both refuse, `ddp` may take with an option."""
    engine = Engine()
    engine.errors = {"ddp": UNUSED, "zro": UNUSED}
    cells = cells_of(trials("matrix.strategy=[ddp, zro, fsdp]"))
    order = ["ddp", "zro", "fsdp"]
    cells.sort(key=lambda cell: order.index(cell.strategy.name))
    listener = RecordingListener()
    found = list(verdicts_on(cells, engine, tmp_path, listener))
    assert engine.names == sorted(order), "fsdp ran, too"
    assert {v.strategy for v in found if v.cause is not None} == {"ddp", "zro"}
    said = [text for text in listener.notes if UNUSED in text]
    assert len(said) == sum(cell.strategy.name != "fsdp" for cell in cells), "each when decided"

    options = "{name: ddp, find_unused_parameters: true}"
    waiting = cells_of(trials(f"matrix.strategy=[ddp, fsdp, {options}]"))
    waiting.sort(key=lambda cell: bool(cell.strategy.options))
    engine = Engine()
    engine.errors = {"ddp": UNUSED, "fsdp": UNUSED}
    with pytest.raises(InputError, match="it fails in its first steps"):
        list(verdicts_on(waiting, engine, tmp_path, listener))
    assert any(trial.strategy.options for trial in engine.ran), "the last one waits no longer"


@pytest.mark.parametrize(
    "strategies", [["ddp", "fsdp"], ["fsdp", "ddp"]], ids=["the first fails", "the last fails"]
)
def test_failure_of_a_strategy_concerns_its_cell_alone(
    tmp_path: Path, strategies: list[str]
) -> None:
    engine = Engine()
    engine.errors = {"ddp": UNUSED}
    cells = cells_of(trials(f"matrix.strategy=[{', '.join(strategies)}]"))
    verdicts = verdicts_on(cells, engine, tmp_path, RecordingListener())
    told = {verdict.id: verdict.equivalent for verdict in verdicts}
    assert {cell.strategy.name: told[cell_of(cell)] for cell in cells} == {
        "ddp": None,
        "fsdp": True,
    }
    assert engine.names == ["ddp", "fsdp"]
