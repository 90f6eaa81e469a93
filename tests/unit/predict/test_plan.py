"""Plans of made-up models: what is predicted, what is refused, and what runs teach."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
from torch import nn

from shardmark.base.errors import InputError
from shardmark.base.results.schema import StabilityFinding, StabilityKind, Summary, TrialResult
from shardmark.base.results.store import StoredRun
from shardmark.base.table.formats import Format
from shardmark.base.table.table import number
from shardmark.experiment.experiment import Experiment
from shardmark.experiment.load import load_experiment
from shardmark.experiment.matrix import cells_of_any_size
from shardmark.predict.batch.predicted import largest
from shardmark.predict.hardware.catalogue import joined_node, load_card
from shardmark.predict.intervals import RESIDUALS
from shardmark.predict.memory import rank_memory, usable_bytes
from shardmark.predict.model_name import ASSUMED_STEPS
from shardmark.predict.models import Models
from shardmark.predict.plan import TOO_LARGE, Plan, Prediction, make_plan, parse_nodes
from shardmark.predict.profile import Amount, Operation, Profile
from shardmark.predict.request import PlanRequest
from shardmark.predict.step import Factors, plan_step
from shardmark.predict.table import answer_table, render_plan, text_of
from shardmark.predict.timing import PRODUCT_SHARE, Constants, in_fp8
from tests import present
from tests.golden.invented import invented_rank, invented_trial
from tests.unit.predict.made import MadeModels, made_profile

ALL = ["single", "ddp", "fsdp", {"name": "fsdp-hybrid", "shard_group": 2}, "zero-1", "zero-3", "pp"]


def experiment(strategies: Sequence[Any] = ALL, **recipe: Any) -> Experiment:
    return Experiment.model_validate(
        {
            "name": "made",
            "workload": {"name": "classification", "dataset": "random"},
            "recipe": {"per_rank_batch": 64, "steps": 1000, "precision": "bf16", **recipe},
            "matrix": {"strategy": list(strategies), "world_size": [1, 2]},
        }
    )


def about(name: str, **options: Any) -> PlanRequest:
    return PlanRequest(subject=name, machines=("8xh100",), **options).resolved()


def texts() -> Experiment:
    return about("hf:Qwen/Qwen3-8B", sequence_length=128).experiment


def planned(of: Experiment, on: str = "h100x8", nodes: str = "1", **options: Any) -> Plan:
    models, constants = options.pop("models", MadeModels()), options.pop("constants", None)
    request = PlanRequest(subject=of, machines=(on,), nodes=parse_nodes(nodes), **options)
    return make_plan(request, models, constants)


def row_of(plan: Plan, strategy: str, ranks: int) -> Prediction:
    (row,) = (row for row in plan.rows if (row.strategy, row.ranks) == (strategy, ranks))
    return row


def test_numbers_of_nodes() -> None:
    assert parse_nodes("4") == (4,)
    assert parse_nodes("1..128") == (1, 2, 4, 8, 16, 32, 64, 128)
    assert parse_nodes("3..8, 2") == (2, 3, 6, 8)
    for wrong in ("", "0", "8..4", "two", "1...4", "99999999"):
        with pytest.raises(InputError, match="--nodes"):
            parse_nodes(wrong)


def test_each_strategy_on_each_number_of_nodes() -> None:
    plan = planned(experiment(), nodes="1..4")
    sizes = [(row.strategy, row.ranks, row.nodes) for row in plan.rows]
    assert sizes[:4] == [("single", 1, 1), ("ddp", 8, 1), ("ddp", 16, 2), ("ddp", 32, 4)]
    assert not [row.place for row in plan.rows if row.reason is not None]
    ddp, fsdp = (row_of(plan, name, 32) for name in ("ddp", "fsdp"))
    assert ddp.memory is not None
    assert ddp.memory.peak_bytes > 4 * 250e6 * 4  # weights, gradients and Adam's averages
    assert present(fsdp.memory).optimizer_state == ddp.memory.optimizer_state / 32
    assert ddp.samples == 64 * 32
    assert ddp.step_seconds == pytest.approx(64 * 12e12 / (0.65 * 989.5e12), rel=0.5)
    assert "dgx-h100" in " ".join(plan.notes)  # whose network it is


def test_the_naive_rule_starts_from_the_fewest_ranks() -> None:
    plan = planned(experiment(["ddp"]), nodes="1,4")
    few, many = plan.rows
    assert few.naive_samples_per_second == few.samples_per_second
    assert few.samples_per_second is not None
    assert many.naive_samples_per_second == pytest.approx(4 * few.samples_per_second)
    assert present(many.samples_per_second) < 4 * few.samples_per_second


def test_without_a_measurement_the_interval_is_that_of_unmeasured_runs() -> None:
    (row,) = planned(experiment(["ddp"])).rows
    bounds = (row.low_seconds, row.high_seconds)
    assert bounds == RESIDUALS["images"].around(present(row.step_seconds))


@pytest.mark.parametrize(
    ("recipe", "on", "nodes", "reason"),
    [
        ({"precision": "bf16"}, "v100-32x8", "1", "no bf16 in hardware"),
        ({"cpu_offload": True}, "h100x8", "1", "it has no CPU offload"),
        ({"per_rank_batch": None, "global_batch": 12}, "h100x8", "1", "12 samples cannot be"),
        ({"gradient_accumulation": 3}, "h100x8", "1", "3 equal micro-batches"),
        ({}, "l40x4", "2", "network between nodes"),
    ],
)
def test_what_cannot_be_predicted_is_a_row_with_its_reason(
    recipe: dict[str, Any], on: str, nodes: str, reason: str
) -> None:
    (row,) = planned(experiment(["ddp"], **recipe), on, nodes).rows
    assert reason in (row.reason or "")
    assert row.step_seconds is None
    assert planned(experiment(["ddp"], **recipe), on, nodes).best == ()


def test_a_strategy_that_refuses_the_recipe_is_a_row() -> None:
    plan = planned(experiment(["pp", "ddp"], precision="fp16"))
    assert "bf16" in (row_of(plan, "pp", 8).reason or "")
    assert row_of(plan, "ddp", 8).reason is None


def test_too_many_ranks_and_unknown_machines_are_refused() -> None:
    with pytest.raises(InputError, match="at most 65536 ranks"):
        planned(experiment(), nodes="16384")
    with pytest.raises(InputError, match="no card 'h1000'"):
        planned(experiment(), "h1000x8")


def test_the_largest_batch_is_the_last_that_fits() -> None:
    of = experiment(["fsdp"])
    (row,) = planned(of).rows
    cell = cells_of_any_size(of)[0][0]
    assert row.largest_batch is not None

    def needed(samples: int) -> float:
        recipe = cell.recipe.model_copy(update={"per_rank_batch": samples})
        return rank_memory(made_profile(), cell.built_strategy, recipe, 8).device_bytes("cuda")

    room = usable_bytes(load_card("h100"))
    assert needed(row.largest_batch) <= room < needed(row.largest_batch + 1)


@pytest.mark.parametrize("last", [0, 1, 2, 777, 2**20])
def test_the_largest_batch_where_needs_bend(last: int) -> None:
    asked = []

    def needed(samples: int) -> float:
        asked.append(samples)
        return 10.0 + max(samples, 3 * samples - 500)

    assert largest(needed, needed(last)) == last
    assert len(asked) < 40


def test_costs_follow_from_the_price_of_a_card() -> None:
    of = experiment(["ddp"], steps=None, epochs=4)
    plan = planned(of, prices_per_hour=(2.0,))
    (row,) = plan.rows
    bound = present(row.time).bound
    assert bound in {"compute", "host", "communication"}
    answer = " ".join(render_plan(plan, Format.TEXT, 80).split())
    assert f" samples/s, {bound}-bound; " in answer
    assert f" of each card; {number(present(row.dollars_for()), digits=2)} dollars" in answer
    assert row.steps == 4 * (50_000 // 512)
    assert row.dollars_for() == pytest.approx(
        2.0 * 8 * row.steps * present(row.step_seconds) / 3600
    )
    (unknown,) = planned(of, models=MadeModels(samples=None)).rows
    assert unknown.hours_for() is None


def test_unequal_work_is_compared_by_its_rate() -> None:
    """Twice the ranks train twice the samples in as many steps: dollars are for a million."""
    of = experiment(["ddp"])
    plan = planned(of, "dgx-h100", nodes="1,2", prices_per_hour=(2.0,))
    one, two = plan.rows
    assert (one.work, two.work) == (1000 * 512, 1000 * 1024)
    assert one.dollars_for(1e6) == pytest.approx((one.dollars_for() or 0) / 0.512)
    cheapest = next(best for best in plan.best if best.question == "cost")
    assert (plan.work, cheapest.row) == (1e6, one)
    assert "for 1 M samples" in text_of(cheapest, plan)
    text = " ".join(render_plan(plan, Format.TEXT, 80).split())
    assert "unequal numbers of samples" in text
    assert "for the recipe" not in text
    equal = planned(experiment(["ddp"], steps=None, epochs=4), "dgx-h100", nodes="1,2")
    assert equal.work is None


def test_the_best_is_of_what_fits() -> None:
    models = MadeModels(made_profile(million_parameters=6_000.0))
    plan = planned(experiment(["ddp", "fsdp"]), nodes="4", models=models)
    assert row_of(plan, "ddp", 32).fit == "no"
    assert row_of(plan, "ddp", 32).fits is False
    assert row_of(plan, "fsdp", 32).fit == "yes"
    assert [best.row.strategy for best in plan.best] == ["fsdp"] * 3
    assert row_of(plan, "ddp", 32).largest_batch == 0


def test_among_ties_the_best_trains_as_one_device() -> None:
    """`zero-1` casts the parameters, and is faster by less than a prediction can tell."""
    plan = planned(experiment(["zero-1", "ddp"]))
    zero, ddp = plan.rows
    assert zero.own_mathematics
    assert not ddp.own_mathematics
    for seconds, best in ((0.995, "ddp"), (0.9, "zero-1")):
        rows = tuple(
            replace(row, samples=round(1e6 * row.time.seconds / factor))
            for row, factor in ((zero, seconds), (ddp, 1.0))
            if row.time is not None
        )
        fastest, *_ = replace(plan, rows=rows).best
        assert (fastest.question, fastest.row.strategy) == ("fastest", best)
        assert {best, *(rival.strategy for rival in fastest.rivals)} == {"ddp", "zero-1"}


@pytest.mark.parametrize(
    ("million_parameters", "fit", "said"),
    [
        (60_000.0, "yes", "of each node, which has 2,048."),
        (160_000.0, "no", "of each node, which has 2,048: it does not fit."),
    ],
)
def test_offloaded_state_has_to_fit_into_the_host(
    million_parameters: float, fit: str, said: str
) -> None:
    """16 bytes for each parameter, divided over the ranks of a node, are all on its host."""
    models = MadeModels(made_profile(units=64, million_parameters=million_parameters))
    of = experiment(["fsdp"], cpu_offload=True, optimizer={"name": "adamw"})
    plan = planned(of, "dgx-h100", models=models)
    (row,) = plan.rows
    assert row.host_bytes == pytest.approx(16e6 * million_parameters, rel=0.01)
    assert row.card_fit == "yes"
    assert row.fit == fit
    assert any(said in note for note in plan.notes)
    answer = " ".join(render_plan(plan, Format.TEXT, 80).split())
    assert ("of each card and 2,384 of 2,048 GiB of each node" in answer) == (fit == "no")
    unknown = planned(of, "h100x8", models=models)
    assert any("whose memory is not known" in note for note in unknown.notes)
    assert unknown.rows[0].fit == "yes"


def test_a_step_that_the_host_bounds_is_named() -> None:
    tiny = made_profile(million_parameters=1.0)
    units = tuple(
        replace(unit, forward=(Operation(kind="other", calls=20),), backward=())
        for unit in tiny.units
    )
    plan = planned(experiment(["ddp"]), models=MadeModels(replace(tiny, units=units)))
    (row,) = plan.rows
    assert row.time is not None
    assert row.time.bound == "host"
    assert row.time.compute_seconds >= 80 * Constants().launch_seconds
    assert any("ddp the card waits for the host" in note for note in plan.notes)
    large = planned(experiment(["ddp"]))
    assert not any("waits for the host" in note for note in large.notes)


def measured(strategy: str, ranks: int, step_seconds: float, of: Experiment) -> TrialResult:
    cells = {cell.strategy.name: cell for cell in cells_of_any_size(of)[0]}
    trial = cells[strategy].model_copy(update={"world_size": ranks, "id": f"{strategy}-{ranks}"})
    device = "NVIDIA H100 80GB HBM3"
    return invented_trial(
        strategy,
        ranks,
        metrics={"samples_per_second": trial.batch_per_step / step_seconds},
        trial=trial.model_dump(mode="json"),
        ranks=tuple(
            invented_rank(rank).model_copy(update={"device": device}) for rank in range(ranks)
        ),
    )


def test_a_run_fixes_the_factors_of_a_slower_machine(tmp_path: Path) -> None:
    """The factors are of computing, from one rank, and of communication, from several."""
    of, constants = experiment(["single", "ddp"]), Constants()
    node, _ = joined_node("h100x8", 4)
    cells = {cell.strategy.name: cell for cell in cells_of_any_size(of)[0]}
    world = Factors(compute=1.7, communication=3.0)

    def seconds(strategy: str, ranks: int, nodes: int = 1) -> float:
        cell = cells[strategy]
        planned_step = plan_step(
            made_profile(),
            cell.built_strategy,
            cell.recipe,
            ranks,
            node,
            nodes=nodes,
            constants=constants,
        )
        return planned_step.time(constants, world).seconds

    sizes = (("single", 1), ("ddp", 8))
    trials = tuple(measured(name, ranks, seconds(name, ranks), of) for name, ranks in sizes)
    run = StoredRun(path=tmp_path / "run", trials=trials)
    plan = planned(of, nodes="1..4", run=run)
    for row in plan.rows:
        assert row.step_seconds == pytest.approx(
            seconds(row.strategy, row.ranks, row.nodes), rel=0.01
        )
        kind = RESIDUALS["more nodes" if row.nodes > 1 else "more ranks"]
        assert (row.low_seconds, row.high_seconds) == kind.around(row.step_seconds or 0.0)
    assert row_of(plan, "ddp", 16).naive_samples_per_second == pytest.approx(
        16 * 64 / seconds("ddp", 8)
    )
    assert "ddp on 8 ranks" in (plan.anchored or "")
    elsewhere = planned(of, "a100-80x8", run=run)
    row = row_of(elsewhere, "ddp", 8)
    assert row.high_seconds == RESIDUALS["another card"].around(row.step_seconds or 0.0)[1]


def test_runs_that_say_nothing_are_refused(tmp_path: Path) -> None:
    of = experiment(["single", "ddp"])
    other = experiment(["single", "ddp"], precision="fp32")
    run = StoredRun(path=tmp_path / "run", trials=(measured("single", 1, 1.0, other),))
    with pytest.raises(InputError, match="no measured trial in this precision"):
        planned(of, run=run)
    alone = experiment(["single", "ddp"], per_rank_batch=1)
    run = StoredRun(path=tmp_path / "run", trials=(measured("single", 1, 1.0, alone),))
    with pytest.raises(InputError, match="1 sample at a time"):
        planned(of, run=run)


def test_disturbed_trials_tell_nothing(tmp_path: Path) -> None:
    """A cell's other repeats count; without any the run is refused, with what disturbed it."""
    of = experiment(["single", "ddp"])
    told = StabilityFinding(
        kind=StabilityKind.OTHER_PROCESSES, text="others had 3 cores", severity=1
    )
    calm = measured("single", 1, 1.0, of)
    slow = measured("single", 1, 9.0, of).model_copy(update={"stability": (told,)})
    plans = [
        planned(of, run=StoredRun(path=tmp_path / "run", trials=trials))
        for trials in ((calm,), (slow, calm))
    ]
    assert plans[0].rows == plans[1].rows
    with pytest.raises(InputError, match="not disturbed: others had 3 cores"):
        planned(of, run=StoredRun(path=tmp_path / "run", trials=(slow,)))


def test_a_run_that_is_not_to_be_trusted_is_said_first(tmp_path: Path) -> None:
    of = experiment(["single", "ddp"])
    short = measured("single", 1, 1.0, of)
    short = short.model_copy(
        update={"metrics": {**short.metrics, "measured_steps": Summary(value=1, over="trial")}}
    )
    trials = (short, measured("ddp", 8, 0.01, of))
    plan = planned(of, run=StoredRun(path=tmp_path / "run", trials=trials))
    few, faster = plan.doubts
    assert few.startswith("Times are doubtful: fewer than 10 steps were measured of single on 1")
    assert faster.startswith("Times on several ranks are doubtful: ddp on 8 ranks: ")
    assert " ".join(render_plan(plan, Format.TEXT, None).split()).startswith(few)


def test_another_training_is_said_and_the_best_exact_one_beside_it() -> None:
    plan = planned(experiment(["ddp", "fsdp", "zero-1", "local-sgd"]), nodes="8")
    fastest, *_ = plan.best
    assert fastest.row.strategy == "local-sgd"
    exact = next(row for row in fastest.rivals if not row.own_mathematics)
    text = text_of(fastest, plan)
    assert "By its own definition: parameters are averaged every 20 steps." in text
    assert f"Training as one device would: {exact.place}" in text
    assert "Too close to tell from" in text
    (single,) = planned(experiment(["ddp"])).best[:1]
    assert (single.rivals, "definition" in text_of(single, plan)) == ((), False)


@pytest.mark.parametrize(
    ("search", "fits", "answer"),
    [
        (False, False, "of each card; --search compares more layouts."),
        (True, False, "Nothing fits: ddp on 8 ranks needs least, "),
        (True, True, "None of the experiment's strategies fits."),
    ],
)
def test_what_search_finds_is_among_the_answers(search: bool, fits: bool, answer: str) -> None:
    models = MadeModels(made_profile(million_parameters=6_000.0 if fits else 600_000.0))
    plan = planned(experiment(["ddp"]), models=models, search=search)
    text = " ".join(render_plan(plan, Format.TEXT, 80).split())
    assert answer in text
    assert ("Best layout that was searched: fsdp" in text) is fits
    if fits:
        assert plan.search is not None
        (best, *_), line = plan.search.front, text.partition("Best layout that was searched: ")[2]
        recomputes = "recomputing activations" in line.partition(" ms a step in ")[0]
        assert recomputes is bool(best.activation_checkpointing)


def test_columns_of_text_stand_to_the_left() -> None:
    table = answer_table(planned(experiment(["ddp", "fsdp"])))
    left = {column.key for column in table.columns if not column.numeric}
    assert left == {"label", "fits", "bound"}


def test_servers_of_one_node_need_no_network(tmp_path: Path) -> None:
    file = tmp_path / "alone.yaml"
    file.write_text("card: h100\ndevices: 8\n")
    (row,) = planned(experiment(["ps-sync"]), str(file)).rows
    assert row.reason is None
    (joined,) = planned(experiment(["ps-sync"]), "dgx-h100").rows
    assert joined.step_seconds == row.step_seconds


@pytest.mark.parametrize(("strategy", "traces"), [("ddp", False), ("pp", True)])
def test_a_model_that_fails_is_a_row_with_its_error(
    strategy: str, traces: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Traced as a whole, or looked at for what passes between its stages."""

    def trace(*_: object, **__: object) -> Profile:
        if traces:
            return made_profile()
        raise RuntimeError("shapes do not match")

    def build_model() -> NoReturn:
        raise RuntimeError("shapes do not match")

    failing = SimpleNamespace(
        build_model=build_model,
        training_samples=1,
        tokens_in=lambda _: None,
        active_parameters=lambda _: None,
    )
    monkeypatch.setattr("shardmark.predict.trace.trace.traced", trace)
    monkeypatch.setattr(Models, "_model", lambda *_: (failing, nn.Identity()))
    monkeypatch.setattr(Models, "check", lambda *_: None)
    plan = planned(experiment([strategy]), models=Models())
    (row,) = plan.rows
    assert "RuntimeError: shapes do not match" in (row.reason or "")
    assert "could be predicted" in render_plan(plan, Format.TEXT, 80)


@pytest.mark.parametrize(
    ("name", "measured_rate"), [("resnet18-digits", 4_900), ("language-quickstart", 141_325)]
)
def test_small_models_take_the_time_of_their_host(name: str, measured_rate: float) -> None:
    """The rates are those of an H100, in `benchmarks/results/2026-11-22-first-gpu.md`.

    Hosts differ by a factor of three, which the interval of a card does not hold.
    """
    of = load_experiment(name, ["matrix.strategy=[single]"])
    (row,) = planned(of, "h100x1", models=Models()).rows
    assert present(row.time).bound == "host"
    assert 1 / 1.5 < measured_rate / row.work_per_second < 1.5


def test_padding_is_no_useful_work() -> None:
    """128 tokens of which 32 are padding: three quarters of the tokens a second, each dearer."""
    paddings: tuple[dict[str, Any], ...] = ({}, {"padding": 0.25}, {"mean_length": 96})
    rows = [planned(texts(), prices_per_hour=(2.0,), **padding).rows[0] for padding in paddings]
    assert len({row.step_seconds for row in rows}) == 1
    assert [row.tokens_per_sample for row in rows] == [128, 96, 96]
    assert rows[1].work_per_second == pytest.approx(0.75 * rows[0].work_per_second)
    assert rows[1].dollars_for(1e9) == pytest.approx((rows[0].dollars_for(1e9) or 0) / 0.75)
    assert rows[1] == rows[2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0.3, 700.0), "--mean-length is given as well"),
        ((1.0, None), "found 1; allowed are fractions"),
        ((None, 0.0), "found 0; allowed are numbers above 0"),
    ],
)
def test_padding_that_cannot_be_is_refused(
    arguments: tuple[float | None, float | None], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        PlanRequest(subject="", machines=(), padding=arguments[0], mean_length=arguments[1])


def test_samples_without_tokens_have_no_padding() -> None:
    row = planned(texts(), mean_length=129).rows[0]
    assert "--mean-length: found 129, but samples have 128 tokens" in str(row.reason)
    with pytest.raises(InputError, match="samples of this model have no tokens"):
        planned(experiment(), padding=0.5)


def test_a_model_alone_is_priced_for_a_billion_tokens_or_a_million_samples() -> None:
    """The number of steps was assumed; the task says how many tokens a sample has."""
    made = MadeModels(replace(made_profile(), tokens_per_sample=626.0))
    of = experiment(["ddp"], steps=ASSUMED_STEPS)
    plan = planned(of, models=made, assumed="its strategies")
    assert (plan.unit, plan.work) == ("tokens", 1e9)
    assert " GPU-hours for 1 B tokens." in text_of(plan.best[-1], plan)
    priced = planned(experiment(["ddp"]), models=made, prices_per_hour=(2.0,), work=1e13)
    answer = text_of(priced.best[-1], priced)
    assert re.search(r"dollars and \d\d?0* hours for 10 T tokens", answer), "as few digits as known"
    assert {row.tokens_per_sample for row in plan.rows} == {626.0}
    plan = planned(of, assumed="its strategies")
    assert (plan.unit, plan.work) == ("samples", 1e6)
    assert " GPU-hours for 1 M samples." in text_of(plan.best[-1], plan)


def test_steps_that_are_given_are_priced() -> None:
    """They were ignored, and a billion tokens priced."""
    request = PlanRequest(
        subject="hf:Qwen/Qwen3-8B", machines=("8xh100",), overrides=("recipe.steps=5000",)
    )
    assert make_plan(request, MadeModels()).work == 5000 * 8 * 4096
    assert make_plan(replace(request, overrides=()), MadeModels()).work == 1e9
    assert make_plan(replace(request, work=7e9), MadeModels()).work == 7e9


def test_micro_batches_are_said() -> None:
    overrides = ["recipe.gradient_accumulation=8"]
    question = about("hf:Qwen/Qwen3-8B", batch=16, overrides=overrides)
    assert "16 sequences of 4096 tokens a GPU and step in 8 micro-batches" in str(question.assumed)
    assert "micro-batch" not in str(about("hf:Qwen/Qwen3-8B", batch=16).assumed)
    few = make_plan(about("hf:Qwen/Qwen3-8B", batch=2, overrides=overrides), MadeModels())
    said = "2 samples are not 8 equal micro-batches; 16 samples a step are micro-batches of 2"
    assert {row.reason for row in few.rows} == {said}


def test_fewer_devices_of_a_machine_are_rows_of_a_model_alone() -> None:
    """The fastest strategy on each half; nobody chose the number of ranks."""
    plan = planned(experiment(["ddp", "fsdp"]), assumed="its strategies")
    sizes = [(row.strategy, row.ranks) for row in plan.rows]
    assert sizes[:2] == [("ddp", 8), ("fsdp", 8)]
    assert [ranks for _, ranks in sizes[2:]] == [4, 2, 1]
    assert sizes[-1] == ("single", 1)
    for ranks in (4, 2):
        (fewer,) = (row for row in plan.rows if row.ranks == ranks)
        others = planned(experiment([fewer.strategy]), f"h100x{ranks}").rows
        assert fewer.work_per_second == pytest.approx(others[0].work_per_second, rel=0.02)
    assert {row.ranks for row in planned(experiment(["ddp"])).rows} == {8}


def test_experts_are_counted_in_full_and_for_a_token() -> None:
    made = MadeModels(replace(made_profile(), active_parameters=20_000_000))
    text = render_plan(planned(experiment(["ddp"]), models=made), Format.TEXT, 80)
    assert "made (250 M parameters, 20 M for a token) on h100x8" in text
    assert "Expert parallelism, which large models usually need, is not planned" in (
        " ".join(text.split())
    )
    alone = render_plan(planned(experiment(["single"]), on="1xh100", models=made), Format.TEXT, 80)
    assert "Expert parallelism" not in alone


def test_nothing_is_traced_whose_state_is_larger_than_all_cards() -> None:
    """8.2 billion parameters: 16 bytes each with AdamW, 2 with LoRA, and about 0.6 with QLoRA."""
    models, phases = Models(), list[str]()
    models.notify = phases.append
    request = PlanRequest(subject="Qwen/Qwen3-8B", machines=("1x3060",), sequence_length=128)
    plan = make_plan(request.resolved(), models)
    (row,) = plan.rows
    assert row.reason == TOO_LARGE
    assert row.time is None
    assert row.memory is not None
    assert row.memory.activations < 1e6
    assert [remedy.change for remedy in plan.remedies] == ["QLoRA", "50 GPUs"]
    assert sum("tracing" in phase for phase in phases) == 2, "those of the remedies"
    text = render_plan(plan, Format.TEXT, 80)
    assert "Nothing fits: single on 1 rank needs least, more than " in text
    assert TOO_LARGE not in text, "the first line says it"
    lora = make_plan(replace(request, adapter="lora").resolved(), models)
    shown = " ".join(render_plan(lora, Format.TEXT, 80).split())
    assert "more than" in shown
    (record,) = json.loads(render_plan(lora, Format.JSON, None))["rows"]
    assert record["at_least"] is True
    assert record["tokens_per_second"] is None or record["tokens_per_second"]["value"] is None


def test_samples_that_are_not_traced_have_their_tokens() -> None:
    """A text-to-text model counts them from its samples: 512 and 114."""
    models = Models()
    (cell, *_), _ = cells_of_any_size(about("google-t5/t5-small").experiment)
    assert models.untraced(cell).tokens_per_sample == 626


def test_a_size_without_activations_is_marked_and_never_said_to_be_the_least() -> None:
    rows = planned(experiment(["fsdp"]), on="8xa100-40", models=MadeModels()).rows
    traced = replace(rows[0], card_fit="no", device_bytes=900 * 2**30, time=None)
    bound = replace(traced, ranks=4, device_bytes=95.4 * 2**30, reason=TOO_LARGE)
    plan = replace(planned(experiment(["fsdp"]), models=MadeModels()), rows=(bound, traced))
    text = " ".join(render_plan(plan, Format.TEXT, 80, memory=True).split())
    assert "fsdp on 8 ranks needs least, 900 of" in text
    assert ">95.4" in text
    assert ">: without activations" in text
    parts = text.partition("Memory of a rank")[2]
    assert parts.count("fsdp") == 2, "one row in two tables: the parts of the other are not known"


def test_programs_with_grouped_products_route_tokens_to_experts() -> None:
    for stack, assumed, routed in (("fused", "it", True), ("eager", "it", False)):
        models = MadeModels(made_profile())
        planned(experiment(["single"]), on="1xh100", models=models, stack=stack, assumed=assumed)
        assert models.routed_experts == routed


def test_long_samples_on_several_cards_are_not_divided() -> None:
    for tokens, on, said in ((32_768, "1xh100", False), (32_768, "h100x8", True)):
        made = MadeModels(replace(made_profile(), tokens_per_sample=float(tokens)))
        plan = planned(experiment(["ddp" if said else "single"]), on=on, models=made)
        assert any("Context parallelism" in note for note in plan.notes) == said
    (note,) = (note for note in plan.notes if "Context" in note)
    setting = note.partition("--set ")[2].split()[0]
    divided = about("hf:Qwen/Qwen3-8B", overrides=[setting]).experiment.matrix["strategy"]
    assert divided == ["fsdp-ulysses"], "what the note says can be given"
    short = MadeModels(replace(made_profile(), tokens_per_sample=8192.0))
    notes = planned(experiment(["ddp"]), models=short).notes
    assert not any("Context parallelism" in note for note in notes)


def test_products_of_blocks_in_8_bits() -> None:
    """12 bytes of 16-bit values, 8 of them inputs: a cast reads these and writes 4 bytes."""
    others = Operation(kind="attention", flops=Amount(per_sample=1.0))
    product = Operation(kind="product", flops=Amount(per_sample=5.0), bytes=Amount(fixed=12.0))
    attention, cast, eight = in_fp8([others, product])
    assert attention == others
    assert (cast.kind, cast.calls, eight.kind) == ("other", 2, "fp8_product")
    assert eight.flops == product.flops
    assert [cast.bytes.fixed, eight.bytes.fixed] == pytest.approx([12.0, 8.0])


def test_8_bits_are_faster_where_the_card_has_them() -> None:
    """Products of 1979 TFLOP/s in place of 989.5; the time of casts is that of their launches."""
    bf16, fp8 = (
        planned(experiment(["single"]), on="1xh100", precision="fp8" if fp8 else None)
        for fp8 in (False, True)
    )
    saved = (bf16.rows[0].step_seconds or 0) / (fp8.rows[0].step_seconds or 1)
    assert saved == pytest.approx(1979 * PRODUCT_SHARE / (989.5 * 0.795), rel=0.02)
    assert (bf16.precision, fp8.precision) == ("bf16", "fp8 in products of blocks, else bf16")
    (row,) = planned(experiment(["single"]), on="1xa100-80", precision="fp8").rows
    assert "has no fp8 in hardware; use bf16" in str(row.reason)
    with pytest.raises(InputError, match="--precision fp8: --search has no products"):
        planned(experiment(["ddp"]), precision="fp8", search=True)
    with pytest.raises(InputError, match="other precisions than bf16"):
        planned(experiment(["ddp"], precision="fp32"), precision="fp8")
    question = about("hf:Qwen/Qwen3-8B", precision="fp8")
    assert (question.fp8, question.experiment.recipe.precision) == (True, "bf16")


def test_a_search_that_fails_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> NoReturn:
        raise InputError("model", "7 heads", "an even number of heads")

    monkeypatch.setattr("shardmark.predict.plan.searcher_of", fail)
    plan = planned(experiment(["ddp"]), search=True)
    (note,) = (note for note in plan.notes if note.startswith("No layouts could be searched: "))
    assert "7 heads" in note


def test_accumulation_is_answered_for_both_ways_to_reduce() -> None:
    """An experiment runs as it says; a model alone has shards of gradients between passes."""
    (row,) = planned(experiment(["fsdp"], gradient_accumulation=4), "h100x8").rows
    assert row.label == "fsdp"
    named = about("hf:Qwen/Qwen3-8B", batch=4, overrides=["recipe.gradient_accumulation=4"])
    plan = make_plan(named, MadeModels())
    assert "fsdp (reduce_each_pass=true)" in {row.label for row in plan.rows}
    (note,) = (note for note in plan.notes if "accumulates 4 micro-batches" in note)
    each, once = (float(part.split()[-1]) for part in note.split(" GiB")[:2])
    assert each < once
    kept = about(
        "hf:Qwen/Qwen3-8B",
        overrides=[
            "recipe.gradient_accumulation=1",
            "matrix.strategy=[{name: fsdp, reduce_each_pass: false}]",
        ],
    )
    assert "reduce_each_pass=true" not in str(
        [row.label for row in make_plan(kept, MadeModels()).rows]
    )


def test_a_model_on_cards_without_bf16_is_cast_to_fp16_as_other_programs_do() -> None:
    """An experiment runs as it says: fp16 under autocast, which keeps parameters in fp32."""
    old, new = "8xv100-32", "8xh100"

    def casting(on: str, *overrides: str, **options: Any) -> set[str]:
        request = PlanRequest(
            subject="hf:Qwen/Qwen3-8B", machines=(on,), overrides=overrides, **options
        )
        rows = make_plan(request, MadeModels()).rows
        return {row.strategy for row in rows if "fp16 (native)" in str(row.own_mathematics)}

    sharded = {"zero-1", "zero-2", "zero-3", "fsdp-grad-op", "fsdp"}
    assert casting(old) == casting(new, precision="fp16") == sharded
    assert casting(new) == set()
    given = "matrix.strategy=[{name: fsdp, mixed_precision: autocast}, zero-3]"
    assert casting(old, given) == {"zero-3"}
    (row,) = planned(experiment(["fsdp"], precision="fp16"), "v100-32x8").rows
    assert not row.own_mathematics


def test_a_reference_model_is_held_as_parameters_are() -> None:
    """2 bytes of each parameter, which FSDP shards; the base of an adapter is its own reference."""
    options: dict[str, Any] = {"overrides": ["matrix.strategy=[ddp, fsdp]"]}
    alone, beside, adapted = (
        {
            row.strategy: present(row.memory).parameters
            for row in make_plan(about("hf:Qwen/Qwen3-8B", **options, **more), MadeModels()).rows
            if row.ranks == 8
        }
        for more in ({}, {"reference_model": True}, {"reference_model": True, "adapter": "lora"})
    )
    copied = 2 * made_profile().size.parameters
    assert beside["ddp"] - alone["ddp"] == copied
    assert beside["fsdp"] - alone["fsdp"] == copied / 8
    assert adapted == alone
    assumed = str(about("hf:Qwen/Qwen3-8B", reference_model=True, adapter="lora").assumed)
    assert "the base as the reference model" in assumed
    assert "no reference model" not in assumed
