"""Speeds that a user has measured: what they mean, and what predictions make of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardmark.base.errors import InputError
from shardmark.base.results.store import StoredRun
from shardmark.experiment.load import from_mapping
from shardmark.experiment.matrix import cells_of_any_size
from shardmark.predict.intervals import RESIDUALS
from shardmark.predict.measured import measured_number
from shardmark.predict.plan import Plan, make_plan
from shardmark.predict.request import PlanRequest
from tests import present
from tests.golden.invented import invented_rank, invented_trial
from tests.unit.predict.made import MadeModels, made_profile

QWEN, LLAMA = "hf:Qwen/Qwen3-8B", "hf:meta-llama/Llama-3.1-8B"


def asked(measured: str | None, *machines: str, **options: Any) -> PlanRequest:
    return PlanRequest(
        subject=options.pop("subject", QWEN),
        machines=machines or ("1xh100",),
        **{"batch": 4, "sequence_length": 1000, "measured": measured, **options},
    )


def planned(measured: str | None, *machines: str, **options: Any) -> Plan:
    models = MadeModels(replace(made_profile(), tokens_per_sample=1000))
    return make_plan(asked(measured, *machines, **options), models)


@pytest.mark.parametrize(
    ("text", "step_seconds"),
    [
        ("8,000 tokens/s on 1xh100", 0.5),
        ("8000 tok/s", 0.5),
        ("8 samples/s on 1xh100", 0.5),
        ("0.5 s/step on 1xa100-80", 0.5),
        ("500 ms/it", 0.5),
        ("2 it/s", 0.5),
        ("8000 tokens/s/GPU on 8xh100 with fsdp", 0.5),
        ("64,000 tokens/s on 8xh100", 0.5),
        ("2 steps/s on 2x8xh100", 0.5),
        ("8k tokens per second", 0.5),
        ("8 k tok/sec", 0.5),
        ("480 samples/min", 0.5),
        ("0.5 seconds per step", 0.5),
        # Each GPU takes part in each step, so that all take as many.
        ("2 it/s/gpu on 8xh100", 0.5),
        ("0.5 s/step/gpu on 8xh100", 0.5),
        ("8000 tok/s on 1x H100 80GB", 0.5),
        ("2 it/s on 8x H100 with FSDP", 0.5),
        ("8000 tok/gpu/s on 8xh100", 0.5),
        ("8 examples per second per device on 8xh100", 0.5),
    ],
)
def test_a_speed_is_read_with_its_unit_and_machine(text: str, step_seconds: float) -> None:
    found = measured_number(asked(text), MadeModels())
    assert found.step_seconds == pytest.approx(step_seconds)
    assert found.micro_batch == 4
    assert ("8x" in text) == (found.devices % 8 == 0)


def test_a_measured_speed_that_cannot_be_right_is_doubted_first() -> None:
    """Such as steps of one sample that were taken for steps of four."""
    (row, *_) = planned(None, "1xa100-80").rows
    speed = present(row.samples_per_second) / 4
    for factor, doubt in ((8, "is 8 times"), (1 / 8, "is 0.12 times"), (3, ""), (1 / 3, "")):
        doubts = planned(f"{factor * speed:.6f} it/s", "1xa100-80").doubts
        assert (doubt in str(doubts), len(doubts)) == (True, bool(doubt))
        assert "--measured-batch" in str(doubts) or not doubt


def test_a_measured_training_is_cast_as_the_planned_one() -> None:
    for text in ("2 it/s on 8xv100-32 with zero-3", "2 it/s on 8xv100-32"):
        trial = measured_number(asked(text, "8xv100-32"), MadeModels()).trial
        assert trial.strategy.options.get("mixed_precision") == (
            "native" if trial.strategy.name.startswith(("zero", "fsdp")) else None
        )
        assert ("with" in text) == (trial.strategy.name == "zero-3")


def test_a_speed_without_a_machine_is_that_of_all_planned_nodes() -> None:
    found = measured_number(asked("64,000 tokens/s", "8xh100", nodes=(4,)), MadeModels())
    assert (found.devices, found.trial.nodes) == (32, 4)
    assert found.step_seconds == pytest.approx(2.0)
    (row,) = (
        row
        for row in planned("64,000 tokens/s", "8xh100", nodes=(4,)).rows
        if row.ranks == 32 and row.strategy == "ddp"
    )
    assert row.work_per_second == pytest.approx(64_000, rel=0.01)
    one = measured_number(asked("64,000 tokens/s on 8xh100", "8xh100", nodes=(1, 4)), MadeModels())
    assert one.devices == 8
    with pytest.raises(InputError, match="does not say on which of 2 machines"):
        measured_number(asked("3 it/s", "8xh100", nodes=(1, 4)), MadeModels())


def test_a_model_whose_data_have_tokens_has_a_speed_in_tokens() -> None:
    """The plan of T5 is in tokens, of which its options say nothing."""
    made = MadeModels(replace(made_profile(), tokens_per_sample=626.0))
    of_t5 = {"subject": "hf:google-t5/t5-base", "sequence_length": 512}
    found = measured_number(asked("5,008 tokens/s", **of_t5), made)
    assert found.step_seconds == pytest.approx(0.5)
    with pytest.raises(InputError, match="tokens/s is not a speed of this model"):
        measured_number(asked("5,008 tokens/s", **of_t5), MadeModels())


def test_the_first_strategy_that_fits_was_measured_unless_one_is_named() -> None:
    large = MadeModels(made_profile(units=64, million_parameters=30_000))
    of_name = measured_number(asked("2 it/s on 8xh100 with zero-3"), large)
    assert of_name.trial.strategy.name == "zero-3"
    of_memory = measured_number(asked("2 it/s on 8xh100"), large).trial.strategy.name
    assert of_memory not in {"ddp", "zero-1"}
    assert measured_number(asked("2 it/s on 8xh100"), MadeModels()).trial.strategy.name == "ddp"


@pytest.mark.parametrize(
    ("text", "machines", "said"),
    [
        ("fast", ("1xh100",), "found 'fast'; allowed is a speed and its machine"),
        ("0 it/s", ("1xh100",), "found '0 it/s'"),
        ("0,42 s/step", ("1xh100",), "found '0,42 s/step'"),
        ("0,420 s/step", ("1xh100",), "found '0,420 s/step'"),
        ("3,1 tokens/s", ("1xh100",), "found '3,1 tokens/s'"),
        ("3 furlongs/s", ("1xh100",), "furlongs/s is not a speed of this model"),
        ("3 it/s", ("1xh100", "1xa100-80"), "does not say on which of 2 machines; add one"),
        ("3 it/s on abacus", ("1xh100",), "there is no node 'abacus'"),
        ("3 it/s on 8xh100 with magic", ("1xh100",), "magic"),
    ],
)
def test_what_is_no_speed_is_a_message(text: str, machines: tuple[str, ...], said: str) -> None:
    with pytest.raises(InputError) as raised:
        measured_number(asked(text, *machines), MadeModels())
    assert said in str(raised.value)


def test_the_same_question_is_answered_by_the_measurement() -> None:
    """The interval is that of runs predicted from another run of theirs, and narrower."""
    plan, unmeasured = planned("2 it/s"), planned(None)
    (row,) = plan.rows
    assert row.step_seconds == pytest.approx(0.5, rel=2e-3)
    assert (row.low_seconds, row.high_seconds) == RESIDUALS["more ranks"].around(
        row.step_seconds or 0.0
    )
    assert "measured 2 it/s" in (plan.anchored or "")
    (alone,) = unmeasured.rows
    widths = [(of.high_seconds or 0) / (of.low_seconds or 1) for of in (row, alone)]
    assert widths[0] < widths[1]


def test_a_measured_batch_and_one_sample_count() -> None:
    """A sample of a language model is many tokens: one is enough."""
    (one,) = planned("4 it/s", batch=1).rows
    assert one.step_seconds == pytest.approx(0.25, rel=2e-3)
    (four,) = planned("4 it/s", measured_batch=1).rows
    assert 0.75 < (four.step_seconds or 0) < 1.0, "four samples, and one update"


def test_another_model_or_card_has_its_own_interval() -> None:
    """A run of another model takes nothing from what is known without one."""
    (row,) = planned("2 it/s", measured_model=LLAMA).rows
    assert row.high_seconds == RESIDUALS["another model"].around(row.step_seconds or 0.0)[1]
    (row,) = planned("2 it/s", measured_model=LLAMA, stack="eager").rows
    assert row.high_seconds == RESIDUALS["eager"].around(row.step_seconds or 0.0)[1]
    (row,) = planned("2 it/s on 1xa100-80").rows
    assert row.high_seconds == RESIDUALS["another card"].around(row.step_seconds or 0.0)[1]
    assert (row.step_seconds or 1) < 0.5, "the planned card is the faster one"


def test_the_run_of_a_script_is_a_measurement_of_the_model(tmp_path: Path) -> None:
    """`shardmark time` counts the samples of a script's steps, and knows no model."""
    device = "NVIDIA H100 80GB HBM3"
    timed = from_mapping(
        {
            "name": "timed",
            "workload": {"name": "script", "command": "train.py"},
            "matrix": {"variant": {"one": "--fast"}, "world_size": [1]},
        }
    )
    (cell,) = cells_of_any_size(timed)[0]
    result = invented_trial(
        "one",
        1,
        metrics={"samples_per_second": 8.0, "measured_steps": 20.0},
        trial=cell.model_dump(mode="json"),
        ranks=(invented_rank(0).model_copy(update={"device": device, "samples": 80}),),
    )
    run = StoredRun(path=tmp_path / "run", trials=(result,))
    plan = planned(None, run=run)
    (row,) = plan.rows
    assert row.step_seconds == pytest.approx(0.5, rel=2e-3)
    assert "of " + str(run.path) in (plan.anchored or "")
