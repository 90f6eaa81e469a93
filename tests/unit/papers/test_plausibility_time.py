"""Published times and rates: with figures that contradict one another, and that do not."""

from __future__ import annotations

import pytest

from shardmark.analysis.studies import load_paper
from shardmark.analysis.studies.against import Against
from tests.unit.papers.studies import CLASSIFIER, check, figure, finding, study


@pytest.mark.parametrize(("seconds", "contradicts"), [(48.0, False), (40.0, True), (55.0, False)])
def test_speedup_above_the_number_of_devices(seconds: float, contradicts: bool) -> None:
    figures = [
        figure("ddp", 2, metrics={"epoch_seconds": 100.0}),
        figure("ddp", 4, metrics={"epoch_seconds": seconds}),
    ]
    found = finding(study(figures), "speed-up above the number of devices")
    assert (found is not None) is contradicts
    if found is not None:
        assert (found.published, found.limit) == (2.5, 2.0)


@pytest.mark.parametrize(("value", "contradicts"), [(2.0, False), (2.2, True)])
def test_stated_speedups(value: float, contradicts: bool) -> None:
    statement = {
        "about": "speedup",
        "strategy": "ddp",
        "world_size": 4,
        "relative_to": {"strategy": "ddp", "world_size": 2},
        "value": value,
    }
    found = finding(study(statements=[statement]), "speed-up above the number of devices")
    assert (found is not None) is contradicts


def test_speedup_over_the_reference() -> None:
    rates = {"single": (1, 100.0), "fsdp": (2, 250.0)}
    figures = [
        figure(name, ranks, metrics={"samples_per_second": rate})
        for name, (ranks, rate) in rates.items()
    ]
    found = finding(study(figures), "speed-up above the number of devices")
    assert found is not None
    assert found.published == 2.5


@pytest.mark.parametrize(("value", "contradicts"), [(0.9, False), (1.04, False), (1.2, True)])
def test_efficiency_above_one(value: float, contradicts: bool) -> None:
    figures = [figure("ddp", 2, metrics={"scaling_efficiency": value})]
    found = finding(study(figures), "scaling efficiency above 1")
    assert (found is not None) is contradicts
    statement = {"about": "scaling_efficiency", "strategy": "ddp", "value": value}
    found = finding(study(statements=[statement]), "scaling efficiency above 1")
    assert (found is not None) is contradicts


@pytest.mark.parametrize(
    ("rate", "samples", "contradicts"),
    [(1000.0, None, False), (1200.0, None, True), (800.0, None, True), (240.0, 12_000, False)],
)
def test_throughput_and_time_are_of_the_same_samples(
    rate: float, samples: int | None, contradicts: bool
) -> None:
    """CIFAR-10 has 50,000 pictures, unless the study says how many it took."""
    figures = [figure("single", 1, metrics={"epoch_seconds": 50.0, "samples_per_second": rate})]
    stated = {} if samples is None else {"workload.training_samples": samples}
    against = study(figures, conditions={**CLASSIFIER, **stated})
    found = finding(against, "throughput, time and samples")
    assert (found is not None) is contradicts


@pytest.mark.parametrize(("total", "contradicts"), [(150.0, False), (152.0, False), (180.0, True)])
def test_total_time_is_that_of_the_stated_epochs(total: float, contradicts: bool) -> None:
    figures = [figure("single", 1, metrics={"epoch_seconds": 30.0}, training_seconds=total)]
    against = study(figures, conditions={**CLASSIFIER, "recipe.epochs": 5})
    found = finding(against, "total time and epochs")
    assert (found is not None) is contradicts
    if found is not None:
        assert found.parts == (("difference:", 30.0),)


def test_total_times_of_the_fourth_study() -> None:
    """30 epochs fit four of six; with FSDP the totals make 31.4 and 32.4, beyond the rounding."""
    found = check(Against(paper=load_paper("asu-fsdp-2024"), pairs=()), "total time and epochs")
    assert found.figure_count == 6
    assert [(one.published, one.limit) for one in found.findings] == [
        (1005.49, 960.0),
        (1135.67, 1050.0),
    ]
    assert "31.4 epochs" in found.findings[0].meaning
