"""Published memory: with figures that contradict the bytes of a model, and that do not."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardmark.analysis.compare.comparison import compare
from shardmark.analysis.studies import load_paper
from shardmark.analysis.studies.against import Against, set_against
from shardmark.analysis.studies.plausibility_memory import most_saved_bytes
from shardmark.analysis.studies.plausibility_ratio import least_ratio
from shardmark.analysis.studies.plausibility_sizes import ModelState, optimizers_of, states_of
from shardmark.results.store import load_run
from tests.golden.invented import invented_trial
from tests.unit.papers.runs import write_detection
from tests.unit.papers.studies import CLASSIFIER, check, figure, finding, peaks, study

RESNET18_BYTES = 4 * 11_181_642


def test_two_way_sharding_saves_half_of_the_state() -> None:
    momentum = ModelState(optimizer="SGD with momentum", parameter_bytes=12.0, source="")
    assert most_saved_bytes(momentum, "fsdp", "single", 2) == 18
    assert most_saved_bytes(momentum, "zero-1", "single", 2) == 6
    assert most_saved_bytes(momentum, "zero-2", "single", 3) == 16
    assert most_saved_bytes(momentum, "fsdp", "ddp", 2) == 30
    assert most_saved_bytes(momentum, "fsdp-hybrid", "single", 4) == 18
    assert most_saved_bytes(momentum, "zero-0", "single", 8) == 0


def test_the_fall_of_the_fourth_study_is_not_shardings_alone() -> None:
    """About 67 MB with momentum, of the 470 MB that the peak fell by."""
    against = Against(paper=load_paper("asu-fsdp-2024"), pairs=())
    (found,) = check(against, "memory saved by sharding").findings
    assert "resnet18" in found.subject
    assert found.published == pytest.approx(0.47e9)
    assert dict(found.parts)["SGD with momentum:"] == pytest.approx(67.1e6, rel=1e-3)
    assert found.limit == pytest.approx(89.5e6, rel=1e-3)
    assert "11,181,642 parameters of resnet18" in found.basis


def test_a_fall_within_the_state_is_not_noted() -> None:
    assert finding(peaks(0.74e9, 0.68e9), "memory saved by sharding") is None
    stated = {"recipe.optimizer.name": "sgd", "recipe.optimizer.momentum": 0.9}
    assert finding(peaks(0.74e9, 0.66e9, **stated), "memory saved by sharding") is None
    found = finding(peaks(0.74e9, 0.65e9, **stated), "memory saved by sharding")
    assert found is not None
    assert found.limit == pytest.approx(1.5 * RESNET18_BYTES)


def test_rounding_widens_the_limit() -> None:
    stated = {"recipe.optimizer.name": "sgd", "recipe.optimizer.momentum": 0.9}
    against = peaks(0.74e9, 0.65e9, **stated)
    rounded = against.paper.model_copy(update={"rounding": {"peak_memory_bytes": 0.01e9}})
    assert finding(Against(paper=rounded, pairs=()), "memory saved by sharding") is None


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        ({}, ("SGD", "SGD with momentum", "Adam")),
        ({"name": "sgd"}, ("SGD", "SGD with momentum")),
        ({"name": "sgd", "momentum": 0}, ("SGD",)),
        ({"name": "sgd", "momentum": 0.9}, ("SGD with momentum",)),
        ({"name": "adamw"}, ("Adam",)),
    ],
)
def test_only_what_the_study_leaves_open_is_allowed_for(
    stated: dict[str, object], expected: tuple[str, ...]
) -> None:
    assert optimizers_of({f"recipe.optimizer.{key}": stated[key] for key in stated}) == expected


@pytest.mark.parametrize(("peak", "contradicts"), [(80e6, True), (86e6, False)])
def test_memory_below_the_models_own_state(peak: float, contradicts: bool) -> None:
    """Parameters and gradients alone are 89.5 MB in full precision."""
    precise = {**CLASSIFIER, "recipe.precision": "fp32"}
    figures = [figure("single", 1, metrics={"peak_memory_bytes": peak})]
    found = finding(study(figures, conditions=precise), "memory below the model's own state")
    assert (found is not None) is contradicts
    assert finding(study(figures), "memory below the model's own state") is None


def test_sharded_state_is_a_part_of_it() -> None:
    precise = {**CLASSIFIER, "recipe.precision": "fp32"}
    figures = [figure("fsdp", 2, metrics={"peak_memory_bytes": 40e6})]
    found = finding(study(figures, conditions=precise), "memory below the model's own state")
    assert found is not None
    assert found.limit == pytest.approx(RESNET18_BYTES)


def test_models_of_unknown_size_are_not_checked() -> None:
    against = peaks(0.74e9, 0.1e9, **{"workload.model": "own"})
    assert check(against, "memory saved by sharding").figure_count == 0
    assert check(against, "memory below the model's own state").figure_count == 0


def test_the_runs_own_parameters_are_preferred_and_named(tmp_path: Path) -> None:
    workload = {"name": "classification", "model": "resnet18", "dataset": "cifar10"}
    trial = {"experiment": "mine", "workload": workload, "recipe": {"global_batch": 64}}
    sizes = {"ddp": 40e6, "fsdp": 20e6}
    trials = [
        invented_trial(name, 2, metrics={"parameter_bytes": size}, trial=trial)
        for name, size in sizes.items()
    ]
    run = load_run(write_detection(tmp_path / "run", trials))
    against = set_against(compare([run]), load_paper("asu-fsdp-2024"))
    (found,) = check(against, "memory saved by sharding").findings
    assert found.limit == 80e6
    assert found.basis == "n = 2, parameter_bytes of ddp on 2 ranks in this run"
    (state, *_) = states_of(against, {**CLASSIFIER, "workload.model": "mobilenet_v2"})
    assert "2,236,682 parameters" in state.source


def test_no_sharding_reaches_less_than_its_share() -> None:
    """The state of DDP is parameters, optimizer state and its gradients twice."""
    assert least_ratio(["SGD"], ["fsdp"], ["single"], 2) == 0.5
    assert least_ratio(["SGD with momentum"], ["fsdp"], ["ddp"], 4) == 3 / 16
    assert least_ratio(["SGD", "Adam"], ["zero-1"], ["zero-0"], 4) == 0.625
    assert least_ratio(["SGD"], ["zero-3"], ["fsdp", "fsdp-hybrid"], 8) == 0.25


@pytest.mark.parametrize(("fsdp", "contradicts"), [(0.27e9, True), (0.34e9, False)])
def test_published_peaks_give_a_ratio(fsdp: float, contradicts: bool) -> None:
    """No size of the model is needed: half of everything is the least that two ranks can hold."""
    found = finding(peaks(0.74e9, fsdp, **{"workload.model": "own"}), "memory ratio of sharding")
    assert (found is not None) is contradicts
    if found is not None:
        assert (found.published, found.limit) == (fsdp / 0.74e9, 0.5)


@pytest.mark.parametrize(
    ("claim", "contradicts"),
    [
        ({"low": 0.1, "high": 0.3}, True),
        ({"low": 0.33, "high": 0.5}, False),
        ({"value": 0.2}, True),
        ({"high": 0.2}, True),
        ({"high": 0.4}, False),
    ],
)
def test_memory_ratios_claimed_of_sharding(claim: dict[str, float], contradicts: bool) -> None:
    about = {"about": "memory_ratio", "strategy": "fsdp", "world_size": 2}
    statement = {**about, "relative_to": {"strategy": "ddp"}, **claim}
    found = finding(study(statements=[statement]), "memory ratio of sharding")
    assert (found is not None) is contradicts
    if found is not None:
        assert found.limit == pytest.approx(1 / 3)


def test_a_claim_without_ranks_is_held_against_the_measured_ones(tmp_path: Path) -> None:
    trials = [invented_trial(name, ranks) for name in ("ddp", "fsdp") for ranks in (2, 8)]
    run = load_run(write_detection(tmp_path / "run", trials))
    found = check(set_against(compare([run]), load_paper("ovi-2025")), "memory ratio of sharding")
    assert found.figure_count == 4
    (one,) = found.findings
    assert "on 2 ranks, as measured here" in one.subject
    nothing = Against(paper=load_paper("ovi-2025"), pairs=())
    assert check(nothing, "memory ratio of sharding").figure_count == 0
