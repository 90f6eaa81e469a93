"""`shardmark verify`: exit codes, the text, and JSON as the contract has it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardmark import cli
from shardmark.base.results.verification import Cause, Verdict, Verification, deviation_text
from shardmark.bench.launch import session
from shardmark.bench.launch.listener import ProgressListener
from shardmark.experiment.experiment import Experiment
from shardmark.experiment.matrix import TrialPlan
from tests.json_fields import problems_of
from tests.unit.bench.reference.verdicts import BAD, BROKEN, FAILED, GOOD, PROMISED, UNAVAILABLE

UNDECIDED = BAD.model_copy(
    update={
        "equivalent": None,
        "cause": Cause(text="cannot be told", evidence="it draws", first_deviation="none"),
    }
)
DIVERGING = UNDECIDED.model_copy(
    update={
        "cause": Cause(
            text="the loss is NaN from step 1 on",
            evidence="the reference's is too",
            training_fails=True,
            first_deviation="losses",
        )
    }
)
NOTE = "verifying [1/2] ddp"
Answer = Callable[..., tuple[int, str]]


@pytest.fixture
def verified(monkeypatch: pytest.MonkeyPatch) -> list[Verdict]:
    """The verdicts that the next `verify` finds; what it asked for is in `asked`."""
    verdicts: list[Verdict] = []

    def fake(
        experiment: Experiment,
        scratch: Path,
        *,
        plan: TrialPlan,
        listener: ProgressListener,
        store: bool,
    ) -> Verification:
        assert store
        assert plan.trials
        assert experiment.name == "quickstart"
        assert not scratch.exists(), "the controller makes it"
        assert scratch.parent.is_dir()
        listener.note(NOTE)
        return Verification(reference="the reference", steps=3, verdicts=tuple(verdicts))

    monkeypatch.setattr(session, "verify_experiment", fake)
    return verdicts


@pytest.fixture
def answer(capsys: pytest.CaptureFixture[str]) -> Answer:
    """Returns what `verify` ends with and prints, without an error."""

    def ask(*options: str) -> tuple[int, str]:
        code = cli.main(["verify", "quickstart", *options])
        captured = capsys.readouterr()
        assert captured.err == ""
        return code, captured.out

    return ask


@pytest.mark.parametrize(
    ("verdicts", "code"),
    [
        ([GOOD, UNAVAILABLE, PROMISED], 0),
        ([GOOD, BROKEN], 1),
        ([GOOD, BAD], 1),
        ([GOOD, FAILED], 1),
        ([GOOD, UNDECIDED], 2),
        ([UNAVAILABLE], 2),
        ([BAD, UNDECIDED], 1),
        ([GOOD, DIVERGING], 1),
    ],
)
def test_exit_code_says_whether_all_are_accepted(
    verified: list[Verdict],
    answer: Answer,
    verdicts: list[Verdict],
    code: int,
) -> None:
    verified.extend(verdicts)
    assert answer("--format", "json")[0] == code


def test_text_has_each_verdict_and_the_cause(verified: list[Verdict], answer: Answer) -> None:
    verified.extend([GOOD, BAD, UNAVAILABLE])
    code, told = answer()
    assert code == 1
    assert told.startswith(f"{NOTE}\n1 of 3 train the same")
    good, bad, absent = (told[told.index(f"\n{name} ") :] for name in ("ddp", "zero-1", "dp"))
    for text, facts in (
        (good, ("fp32", "bucket_mb=1.0", "recipe.seed=4", "  equivalent", "0.25 of its")),
        (bad, ("NOT EQUIVALENT", "gradients are clipped to norm 1", "0.2 tolerances")),
        (bad, ("(fc.weight)", "setting: gradient_clipping")),
        (absent, ("not tried", "unavailable: no CUDA device; use ddp")),
    ):
        assert [fact for fact in facts if fact not in text] == []


def test_a_cause_is_printed_once(verified: list[Verdict], answer: Answer) -> None:
    verified.extend([UNDECIDED, GOOD, UNDECIDED, BAD])
    text = answer()[1]
    assert text.count("(it draws)") == 1
    assert text.count("    cause 1, as above\n") == 1
    assert "    cause 2: gradients are clipped" in text
    assert "undecided\n" in text


def test_text_names_the_source_of_weights_once(verified: list[Verdict], answer: Answer) -> None:
    told = "equal in 3 steps: the ranks add them up"
    check = GOOD.checks[0].model_copy(
        update={"name": "sample weights", "found": told, "expected": told}
    )
    verified.extend([GOOD.model_copy(update={"checks": (check,)})] * 2)
    assert answer()[1].count("sample weights: the ranks add them up\n") == 1


def test_json_has_the_documented_keys_alone(verified: list[Verdict], answer: Answer) -> None:
    verified.extend([GOOD, BAD, UNAVAILABLE])
    printed: dict[str, Any] = json.loads(answer("--format", "json")[1])
    assert printed.keys() == {"schema_version", "reference", "steps", "verdicts", "seconds"}
    assert Verification.model_validate(printed).verdicts == tuple(verified)
    assert problems_of("Verification", printed) == []


def test_bad_input_exits_two(
    verified: list[Verdict],  # noqa: ARG001  (nothing must be verified)
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["verify", "quickstart", "--set", "recipe.nonsense=1"]) == 2
    assert "recipe.nonsense" in capsys.readouterr().err
    assert cli.main(["verify", "no-such-preset"]) == 2


@pytest.mark.parametrize(
    ("value", "shown"),
    [(None, "-"), (0.0, "0"), (0.0312, "0.031"), (900.0, "9e+02"), (float("inf"), "not finite")],
)
def test_deviations_are_shown_short(value: float | None, shown: str) -> None:
    assert deviation_text(value) == shown


def test_a_strategys_numerics_are_described(verified: list[Verdict], answer: Answer) -> None:
    told = ("gradients are reduced in bf16", "updates come late")
    verified.append(GOOD.model_copy(update={"mathematics": told}))
    assert f"\n    by its own definition, {'; '.join(told)}\n" in answer()[1]
