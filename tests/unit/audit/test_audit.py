"""Answers of the audit for records that the test writes in place of the script's ranks."""

from __future__ import annotations

import json
import os
import runpy
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shardmark.audit import causes
from shardmark.audit.audit import AuditReport
from shardmark.audit.comparison import Records
from shardmark.audit.script import audit_script
from shardmark.base.errors import InputError
from shardmark.base.evidence.accepted import ACCEPTABLE
from shardmark.cli import main
from shardmark.scripts import interventions
from shardmark.scripts.batches import checksum, row_checksums
from shardmark.scripts.command import ScriptCommand, parse_command
from shardmark.scripts.launch import RankProcess
from shardmark.scripts.record import Forward, LossCall, Micro, Record, Step
from shardmark.scripts.recording import Plan, rank_file
from shardmark.scripts.start import Protection, Started
from tests import present


class Ended(Started):
    """A start whose processes have ended."""

    def __init__(self, log: Path) -> None:
        log.write_text("the last line")
        self.log = log

    def wait(self, seconds: float) -> int | None:  # noqa: ARG002
        return 0

    def end(self) -> None:
        pass


def audited(*records: Record, replay: Record | None = None) -> AuditReport:
    def start(_command: ScriptCommand, _ranks: int, plan: Plan, log: Path) -> Started:
        for record in [replay] if plan.replays and replay is not None else records:
            record.save(rank_file(plan.directory, record.rank))
        return Ended(log)

    return audit_script(parse_command(["train.py"]), ranks=2, start=start)


def test_the_refusal_of_one_rank_is_the_answer() -> None:
    report = audited(Record(rank=0, ranks=2, refusal="two optimizers take steps"))
    assert report.same is None
    assert "two optimizers take steps" in report.answer


def records(*ranks: Step, replay: Step) -> Records:
    def record(rank: int, step: Step, rows: int) -> Record:
        forward = Forward(module="Linear", inputs=[], outputs=[], rows=rows, step=0)
        count = 1 if rows > 4 else len(ranks)
        return Record(rank=rank, ranks=count, names=["weight"], steps=[step], forwards=[forward])

    return Records(
        ranks=[record(n, s, 4) for n, s in enumerate(ranks)],
        replay=record(0, replay, 4 * len(ranks)),
        disturbed=None,
    )


def step(**settings: float) -> Step:
    return Step(settings=[{"lr": 0.1}, {"lr": 0.2, "weight_decay": 0.1, **settings}])


def test_the_learning_rate_of_a_later_group_is_compared() -> None:
    both = records(step(lr=0.4), step(lr=0.4), replay=step())
    finding = present(causes.of_rates(both))
    assert (finding.name, "0.4" in finding.evidence) == ("learning_rate_scaled", True)
    assert causes.of_settings(both) is None
    fewer_groups = records(step(), step(), replay=Step(settings=[{"lr": 0.2}]))
    finding = present(causes.of_rates(fewer_groups))
    assert "0.1 on 2 ranks, 0.2 in one process" in finding.evidence


@pytest.mark.parametrize("key", ["lr", "weight_decay"])
def test_settings_of_the_optimizer_that_differ_by_rank_are_named(key: str) -> None:
    both = records(step(), step(**{key: 0.4}), replay=step())
    finding = present(causes.of_settings(both))
    assert finding.name == "settings_differ"
    assert key in finding.deviation
    assert "0.4" in finding.evidence
    assert causes.of_rates(both) is None


def test_a_weight_decay_that_follows_the_number_of_ranks_is_named() -> None:
    both = records(step(weight_decay=0.2), step(weight_decay=0.2), replay=step())
    finding = present(causes.of_settings(both))
    assert finding.name == "settings_depend_on_ranks"
    assert "0.2 on 2 ranks, 0.1 in one process" in finding.evidence


@pytest.mark.parametrize("rounded", [True, False])
def test_zeros_do_not_count_as_rounded_gradients(rounded: bool) -> None:
    exact = torch.zeros(1000)
    exact[:50] = torch.linspace(1.0, 2.0, 50) ** 3
    off = exact.bfloat16().float() if rounded else exact * torch.linspace(0.999, 1.001, 1000)
    gradients: list[Tensor | None] = [off]
    both = records(Step(gradients=gradients), Step(gradients=gradients),
                   replay=Step(gradients=[exact]))  # fmt: skip
    finding = causes.of_gradient(both)
    assert (finding is not None and finding.name == "precision") == rounded


def test_json_has_the_reports_before_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def audit(command: ScriptCommand, *, ranks: int, **_: Any) -> AuditReport:
        if ranks > 2:
            raise InputError("command", "its 3 ranks fail", "use 2")
        return AuditReport(
            command=command.text,
            ranks=ranks,
            steps=3,
            same=True,
            answer="yes",
            findings=(),
            checks=(),
            method="replay",
            frameworks=("torch",),
            notes=(),
        )

    monkeypatch.setattr("shardmark.audit.script.audit_script", audit)
    assert main(["audit", "--ranks", "2,3", "--format", "json", "train.py"]) == 2
    printed = capsys.readouterr()
    (report,) = json.loads(printed.out)["audits"]
    assert report["ranks"] == 2
    assert "its 3 ranks fail" in printed.err


def test_a_script_that_does_not_exist_is_refused_before_anything_starts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["audit", "--", "torchrun", "--nproc-per-node", "2", "nowhere.py"]) == 2
    assert "no file 'nowhere.py'" in capsys.readouterr().err


def test_causes_that_a_user_may_accept_are_causes() -> None:
    assert set(ACCEPTABLE) <= causes.CAUSES.keys()


def two_backward_passes(samples: list[list[float]], **micros: list[Any]) -> Records:
    """Two ranks whose gradients are the sum of those of two backward passes."""
    calls = [LossCall(function="mse_loss", reduction="mean", weight=2.0, value=0.5)]
    passes = [
        Micro(loss=0.5, losses=calls, gradients={0: torch.ones(2)}, place="train.py:7")
        for _ in samples
    ]
    for name, values in micros.items():
        for micro, value in zip(passes, values, strict=True):
            setattr(micro, name, value)
    both = records(*(Step(gradients=[2 * torch.ones(2)], micros=passes) for _ in range(2)),
                   replay=step())  # fmt: skip
    for rank in both.ranks:
        rank.forwards = [
            Forward(module="Linear", inputs=[torch.tensor(rows, dtype=torch.float64)], outputs=[],
                    rows=len(rows), step=0, micro=number)
            for number, rows in enumerate(samples)
        ]  # fmt: skip
    return both


@pytest.mark.parametrize(
    ("samples", "micros", "adds"),
    [
        ([[1.0, 2.0], [3.0, 4.0]], {}, True),
        ([[1.0, 2.0], [1.0, 2.0]], {}, False),
        ([[1.0, 2.0], [3.0, 4.0]], {"loaders": [[0], [1]]}, False),
        ([[1.0, 2.0], [3.0, 4.0]], {"place": ["train.py:7", "train.py:9"]}, False),
        (
            [[1.0, 2.0], [3.0, 4.0]],
            {"place": ["train.py:7", "train.py:9"], "loaders": [[0], [0]]},
            True,
        ),
    ],
    ids=["micro-batches", "one batch", "two loaders", "two losses", "two branches"],
)
def test_several_losses_of_one_step_are_no_accumulation(
    samples: list[list[float]], micros: dict[str, list[Any]], adds: bool
) -> None:
    finding = causes.of_accumulation(two_backward_passes(samples, **micros))
    assert (finding is not None and finding.name == "accumulation_not_divided") == adds


@pytest.mark.parametrize(
    ("samples", "known", "said"),
    [
        ([[1.0, 2.0], [3.0, 4.0]], False, True),
        ([[1.0, 2.0], [3.0, 4.0]], True, False),
        ([[1.0, 2.0], [1.0, 2.0]], False, False),
    ],
    ids=["own loss", "loss of torch", "one batch"],
)
def test_micro_batches_of_an_unknown_loss_are_not_said_to_be_divided_rightly(
    samples: list[list[float]], *, known: bool, said: bool
) -> None:
    losses: dict[str, list[Any]] = {} if known else {"losses": [[], []]}
    text = causes.of_unknown_division(two_backward_passes(samples, **losses))
    assert (text is not None and "2 micro-batches are divided" in text) == said


@pytest.mark.parametrize(("left", "matched"), [(True, True), (False, False)])
def test_rows_that_one_process_pads_on_the_left_are_the_ranks_rows(
    left: bool, matched: bool
) -> None:
    both = records(step(), step(), replay=step())
    rows = [[[5.0, 6, 7]], [[0.0, 0, 8, 9, 4]]]
    joined = [[0.0, 0, *rows[0][0]] if left else [0.0, *rows[0][0], 0.0], *rows[1]]
    for record, of_record in zip((*both.ranks, both.one_process), (*rows, joined), strict=True):
        tensor = torch.tensor(of_record)
        record.forwards[0].inputs = [row_checksums(tensor)]
        record.forwards[0].from_end = [row_checksums(tensor.flip(1))]
    assert both.matched == matched


def updated(*, gradients: Sequence[float], after: Sequence[float], **more: Any) -> list[Step]:
    """A step of each rank."""
    return [
        Step(gradients=[torch.full((2,), g)], after=[torch.full((2,), w)], **more)
        for g, w in zip(gradients, after, strict=True)
    ]


def started(*steps: Step) -> Records:
    both = records(*steps, replay=Step(gradients=[torch.full((2,), 2.0)]))
    for rank in both.ranks:
        rank.before, rank.start = [torch.ones(2)], [2.0]
    return both


@pytest.mark.parametrize(("after", "reduced"), [((0.8, 0.8), True), ((0.9, 0.7), False)])
def test_equal_updates_by_different_gradients_are_reduced_in_the_step(
    after: tuple[float, float], reduced: bool
) -> None:
    both = started(*updated(gradients=(1.0, 3.0), after=after))
    assert both.reduces_in_step == reduced
    assert (causes.of_disagreement(both) is None) == reduced


def test_gradients_that_the_optimizer_reduces_are_read_after_its_step() -> None:
    both = started(
        *updated(gradients=(1.0, 3.0), after=(0.8, 0.8), reduced=[torch.full((2,), 2.0)])
    )
    assert both.after_reduction().gradients()["weight"].tolist() == [2.0, 2.0]
    unchanged = started(*updated(gradients=(1.0, 3.0), after=(0.8, 0.8)))
    assert unchanged.after_reduction() is unchanged


@pytest.mark.parametrize(
    ("after", "moved", "name"),
    [
        ((0.9, 0.7), (0.8, 0.8), "local_steps"),
        ((0.9, 0.7), (0.9, None), None),
        ((0.8, 0.8), (0.5, None), "weights_changed_by_rank"),
        ((0.8, 0.8), (0.5, 0.5), None),
    ],
)
def test_weights_that_change_outside_of_the_optimizer(
    after: tuple[float, float], moved: tuple[float | None, ...], name: str | None
) -> None:
    first = updated(gradients=(1.0, 3.0), after=after)
    both = started(*first)
    for rank, value in zip(both.ranks, moved, strict=True):
        change = {} if value is None else {0: checksum(torch.full((2,), value))}
        rank.steps.append(replace(rank.steps[0], moved=change))
    replay = present(both.replay)
    replay.steps.append(replay.steps[0])
    finding = causes.of_weights(both)
    assert (None if finding is None else finding.name) == name
    if name == "weights_changed_by_rank":
        assert "rank 0 alone" in present(finding).reason


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({}, ("joins no process group", "docs/guides/from-one-gpu.md")),
        (
            {"joined": True},
            ("wraps no model and calls no collective", "docs/guides/from-one-gpu.md"),
        ),
        (
            {"joined": True, "accelerate_alone": True},
            ("wraps no model and calls no collective", "use_cpu=True"),
        ),
        ({"joined": True, "collectives": 1}, None),
        ({"joined": True, "frameworks": ["DDP"]}, None),
    ],
)
def test_a_script_that_is_not_distributed(
    facts: dict[str, Any], words: tuple[str, str] | None
) -> None:
    both = started(*updated(gradients=(1.0, 3.0), after=(0.9, 0.7)))
    finding = causes.of_distribution(replace(both, ranks=[replace(r, **facts) for r in both.ranks]))
    assert (finding is None) == (words is None)
    if finding is not None and words is not None:
        assert words[0] in finding.reason
        assert words[1] in finding.remedy


def test_ranks_that_start_with_other_weights_are_named() -> None:
    both = started(*updated(gradients=(1.0, 1.0), after=(0.9, 0.9)))
    assert causes.of_start(both) is None
    both.ranks[1].before = [both.ranks[0].before[0] * (1 + 2e-7)]
    assert causes.of_start(both) is None, "a rounding, as of weights that were moved and put back"
    both.ranks[1].before = [torch.full((2,), 2.0)]
    finding = present(causes.of_start(both))
    assert finding.name == "different_start"
    assert "differ by 50 %" in finding.deviation
    assert "weight of rank 1 differ from rank 0's" in finding.evidence


def test_an_optimizer_that_torch_does_not_know_is_explained() -> None:
    with pytest.raises(InputError, match=r"called 4 times.* derive from torch.optim.Optimizer"):
        audited(*(Record(rank=rank, ranks=2, backward_passes=4) for rank in range(2)))


def test_accelerate_on_a_cpu_has_its_own_remedy() -> None:
    with pytest.raises(InputError, match=r"rank 1 takes no .*accelerate launch --cpu"):
        audited(Record(rank=0, ranks=1, steps=[Step()], accelerate_alone=True))


def test_weights_that_are_not_finite_at_the_start_are_named() -> None:
    both = started(*updated(gradients=(float("nan"),) * 2, after=(1.0, 1.0)))
    for rank in both.ranks:
        rank.before = [torch.tensor([1.0, float("nan")])]
    report = audited(*both.ranks, replay=both.replay)
    assert report.same is None
    assert "the weights at the start are not finite (weight)" in report.answer


def test_an_optimizer_that_resumes_in_one_process_only_is_no_reference() -> None:
    both = started(*updated(gradients=(1.0, 1.0), after=(0.9, 0.9)))
    report = audited(*both.ranks, replay=replace(present(both.replay), resumed_at=3))
    assert report.same is None
    assert "0 steps on the ranks and 3 steps in one process" in report.answer


@pytest.mark.parametrize(
    ("options", "accepted"),
    [
        ([], ["batch_norm_of_share"]),
        (["--accept", "precision"], ["batch_norm_of_share", "precision"]),
        (["--strict"], []),
        (["--strict", "--accept", "batch_norm_of_share"], ["batch_norm_of_share"]),
    ],
)
def test_batch_norm_of_each_rank_is_accepted_unless_strict(
    options: list[str], accepted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[str]] = []

    def audit(_command: ScriptCommand, *, accept: list[str], **_: Any) -> AuditReport:
        seen.append(accept)
        raise InputError("command", "it is not started", "look at the options")

    monkeypatch.setattr("shardmark.audit.script.audit_script", audit)
    assert main(["audit", *options, "train.py"]) == 2
    assert seen == [accepted]


@pytest.mark.parametrize(("factor", "matched"), [(1 + 1e-7, True), (1.001, False)])
def test_rows_match_up_to_rounding(factor: float, matched: bool) -> None:
    both = two_backward_passes([[1.0, 2.0], [-3.0, 1e-9]])
    present(both.replay).forwards = [
        replace(forward, inputs=[factor * forward.inputs[0]])
        for rank in both.ranks
        for forward in rank.forwards
    ]
    assert both.matched == matched


@pytest.mark.parametrize(
    "bar", ["Loading weights: 100%", " 30%|###   | 3/10 [00:01<00:02,  2.5it/s]", "3/10 [00:01"]
)
def test_a_progress_bar_is_no_error(bar: str, tmp_path: Path) -> None:
    run = Ended(tmp_path / "log.txt")
    run.log.write_text(f"the model is too small\n{bar}\n")
    assert run.error() == "the model is too small"


@pytest.mark.parametrize(
    "line",
    [
        "/usr/bin/python: No module named pkg.__main__; 'pkg' is a package and cannot be executed",
        "python: can't open file 'x.py': [Errno 2] No such file or directory",
        "train.py: error: the following arguments are required: --data",
        "ModuleNotFoundError: No module named 'timmx'",
    ],
)
def test_the_line_of_python_s_error_stands_before_what_torchrun_adds(
    line: str, tmp_path: Path
) -> None:
    run = Ended(tmp_path / "log.txt")
    footer = "traceback : To enable traceback see: https://pytorch.org/docs/stable/errors.html"
    run.log.write_text(f"usage: train.py\n{line}\nE1129 failed (exitcode: 1)\n  {footer}\n")
    assert run.error() == line


def test_an_error_has_the_line_of_the_script_and_not_of_a_library(tmp_path: Path) -> None:
    run = Ended(tmp_path / "log.txt")
    frames = [
        ("<frozen runpy>", 88), ("/home/me/train.py", 9),
        (interventions.__file__, 64), ("/venv/bin/torchrun", 8),
        ("/venv/lib/python3.11/site-packages/torch/cuda/__init__.py", 300),
    ]  # fmt: skip
    lines = [f'[rank0]:   File "{file}", line {number}, in main' for file, number in frames]
    run.log.write_text("\n".join(["Traceback:", *lines, "[rank0]: IndexError: out of range"]))
    assert run.error() == "IndexError: out of range (train.py:9)"
    spawned = [
        "Traceback (most recent call last):", lines[1].replace("9", "20"),
        "torch.multiprocessing.spawn.ProcessRaisedException: ", "",
        "-- Process 1 terminated with the following error:",
    ]  # fmt: skip
    run.log.write_text("\n".join([*spawned, *lines, "IndexError: out of range"]))
    assert run.error() == "IndexError: out of range (train.py:9)"


def test_a_gradient_of_zero_shows_nothing() -> None:
    zero = Step(gradients=[torch.zeros(4)])
    assert "is 0 on the ranks" in causes.unseen(records(zero, zero, replay=zero))
    some = Step(gradients=[torch.ones(4)])
    assert causes.unseen(records(some, some, replay=some)) == ""


@pytest.mark.parametrize(("second", "shows"), [(1.0, False), (2.0, True)])
def test_equal_rows_on_all_ranks_show_nothing(second: float, shows: bool) -> None:
    step = Step(gradients=[torch.ones(4)], micros=[Micro(gradients={0: torch.ones(4)})])
    both = records(step, step, replay=step)
    for rank, row in zip(both.ranks, (1.0, second), strict=True):
        rows = torch.tensor([row, row])
        rank.forwards = [Forward(module="Net", inputs=[rows], outputs=[], rows=2, step=0)]
    assert bool(causes.unseen(both)) is not shows


@pytest.mark.parametrize(("used", "same"), [(2.0, True), (4.0, False)])
def test_without_the_ranks_samples_their_own_gradients_are_the_reference(
    used: float, same: bool
) -> None:
    calls = [LossCall(function="mse_loss", reduction="mean", weight=2.0, value=0.5)]
    own = Micro(loss=0.5, losses=calls, gradients={0: torch.full((2,), 2.0)})
    facts: dict[str, Any] = {"settings": [{"lr": 0.1}], "micros": [own]}
    steps = updated(gradients=(used, used), after=(0.9, 0.9), **facts)
    both = started(*steps)
    replay = present(both.replay)
    alone = replace(replay, steps=[replace(replay.steps[0], **facts)])
    ranks = [replace(rank, joined=True, frameworks=["DDP"]) for rank in both.ranks]
    for number, rank in enumerate(ranks):
        rank.forwards = [replace(rank.forwards[0], inputs=[torch.arange(4.0) + 10 * number])]
    report = audited(*ranks, replay=alone)
    assert report.method.startswith("own gradients")
    (gradient,) = [check for check in report.checks if check.name == "gradient, step 1"]
    assert gradient.holds == same
    assert report.same is same, report.answer
    assert [finding.name for finding in report.findings] == ([] if same else ["summed"])


@pytest.mark.parametrize("writes_are_fine", [True, False])
def test_all_folders_of_a_start_are_removed_with_it(
    writes_are_fine: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    starts: list[Protection] = []

    def start(_words: Any, _environment: Any, log: Path, protection: Protection) -> Started:
        starts.append(protection)
        return Ended(log)

    monkeypatch.setattr("shardmark.scripts.launch.start_words", start)
    with pytest.raises(InputError, match="no rank takes an optimizer step"):
        audit_script(parse_command([str(script)]), ranks=2, writes_are_fine=writes_are_fine)
    (protection,) = starts
    layers = [] if protection.upper is None else [str(Path(protection.upper).parent)]
    assert bool(layers) is not writes_are_fine
    assert protection.owned == (protection.folder, *layers)
    assert not any(Path(folder).exists() for folder in protection.owned)


@pytest.mark.parametrize(
    ("words", "folder"), [(("-m", "train", "--fast"), "."), (("src/train.py", "--fast"), "src")]
)
def test_a_replay_finds_modules_beside_the_script_first(
    words: tuple[str, ...], folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[list[str], list[str]]] = []
    for name in ("run_module", "run_path"):
        monkeypatch.setattr(runpy, name, lambda *_, **__: seen.append((sys.path[:], sys.argv)))
    monkeypatch.setattr("shardmark.scripts.hooks.install", lambda: None)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.chdir(tmp_path)
    process = RankProcess(
        words=("python", *words), prefix="", path=("/lib",), environment={}, folder=str(tmp_path)
    )
    process.run_alone(Plan(directory=str(tmp_path), steps=1))
    assert seen == [([str((tmp_path / folder).resolve()), "/lib"], list(words[-2:]))]
    assert os.environ["WORLD_SIZE"] == "1"
