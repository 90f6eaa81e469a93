"""The figures hold the numbers that one computes by hand from the trials."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import pytest

from shardmark.base.results.schema import (
    Failure,
    Outcome,
    RankRecord,
    StabilityFinding,
    StabilityKind,
    TrialResult,
)
from shardmark.base.statistics.intervals import estimate_mean
from shardmark.bench.analysis.compare.comparison import Comparison, compare
from shardmark.bench.analysis.compare.rows import Row
from shardmark.bench.analysis.compare.series import (
    MAX_POINTS,
    SMOOTHED_READINGS,
    OverTime,
    loss_curve,
    sampled,
    smoothed,
    thinned,
)
from shardmark.bench.report.figures import Figure, Panel, Series, figures_of, over_time
from shardmark.bench.report.figures.drawing import _x_channel
from shardmark.bench.report.figures.entries import Entry, groups_of
from tests import present
from tests.golden.invented import (
    invented_rank,
    invented_trial,
    sample_line,
    server_record,
    store_and_compare,
    two_epoch_rank,
)

MEBIBYTE = 2**20


def figures_by_name(comparison: Comparison) -> dict[str, Figure]:
    return {figure.name: figure for figure in figures_of(comparison)}


def series_named(panel: Panel, name: str) -> Series:
    return next(series for series in panel.series if series.name == name)


def trials(repeats: int = 2) -> list[TrialResult]:
    return [
        invented_trial(strategy, size, repeat)
        for strategy, size in (("single", 1), ("ddp", 2), ("ddp", 4))
        for repeat in range(repeats)
    ]


def test_throughput_is_each_rows_estimate(tmp_path: Path) -> None:
    comparison = store_and_compare(tmp_path, trials())
    panel = figures_by_name(comparison)["throughput"].panels[0]
    assert panel.categories == ("ddp, 4 ranks", "ddp, 2 ranks", "single, 1 rank"), "fastest first"
    single, ddp = series_named(panel, "single"), series_named(panel, "ddp")
    expected = estimate_mean([400.0, 404.0])
    assert single.y == pytest.approx((402.0,))
    assert single.low == pytest.approx((expected.low,))
    assert single.high == pytest.approx((expected.high,))
    assert ddp.x == ("ddp, 2 ranks", "ddp, 4 ranks")
    assert ddp.y == pytest.approx((800 / 1.1 * 1.01, 1600 / 1.1 * 1.01))
    sizes = [comparison.rows[row].world_size for row in (*single.rows, *ddp.rows)]
    assert sizes == [1, 2, 4], "the page's filters find each bar by its row"


def test_scaling_has_the_ideal_of_the_single_device(tmp_path: Path) -> None:
    figure = figures_by_name(store_and_compare(tmp_path, trials()))["scaling"]
    rate, efficiency = figure.panels
    ideal = series_named(rate, "ideal")
    assert ideal.dashed
    assert ideal.x == rate.x_ticks == (1.0, 2.0, 4.0)
    assert ideal.y == pytest.approx((402.0, 804.0, 1608.0))
    assert series_named(rate, "ddp").x == (2.0, 4.0)
    # `ddp` is held against `single` on two ranks, and against itself on four
    on_two = 100 * (800 / 1.1 * 1.01) / 804
    assert series_named(efficiency, "ddp").y == pytest.approx((on_two, 100.0), rel=1e-3)


def test_memory_is_stacked_by_kind_for_the_fullest_worker_and_server(tmp_path: Path) -> None:
    def rank(number: int, peak_bytes: float, role: str = "worker") -> RankRecord:
        record = invented_rank(number)
        probe = present(record.probe).model_copy(update={"peak_memory_bytes": int(peak_bytes)})
        return record.model_copy(update={"probe": probe, "role": role})

    ranks = (rank(0, 305e6), rank(1, 400e6), rank(2, 200e6, "server"))
    run = [invented_trial("ddp", 2), invented_trial("ps-sync", 2, ranks=ranks)]
    panel = figures_by_name(store_and_compare(tmp_path, run))["memory"].panels[0]
    assert panel.kind == "stacked"
    names = ("ddp, 2 ranks", "ps-sync, 2 ranks + 1 server", "ps-sync, server of 2 ranks")
    assert panel.categories == names
    assert series_named(panel, "parameters").y == pytest.approx([44_700_000 / MEBIBYTE] * 3)
    assert series_named(panel, "optimizer state").y == pytest.approx([89_400_000 / MEBIBYTE] * 3)
    other = [(peak - 178_800_000) / MEBIBYTE for peak in (305e6, 400e6, 200e6)]
    assert series_named(panel, "activations and other").y == pytest.approx(other)


def test_the_frontier_excludes_dominated_points(tmp_path: Path) -> None:
    cells = {"ddp": (300, 200), "fsdp": (100, 50), "zero-2": (90, 150), "dp": (200, 80)}
    run = [
        invented_trial(
            strategy,
            2,
            metrics={"samples_per_second": rate, "peak_memory_bytes": mebibytes * MEBIBYTE},
        )
        for strategy, (rate, mebibytes) in cells.items()
    ]
    panel = figures_by_name(store_and_compare(tmp_path, run))["speed-and-memory"].panels[0]
    frontier = series_named(panel, "frontier")
    assert list(zip(frontier.x, frontier.y, strict=True)) == [
        (50, 90), (50, 100), (80, 100), (80, 200), (200, 200), (200, 300), (200, 300)
    ]  # fmt: skip
    assert {series.name: series.text for series in panel.series if series.text} == {
        strategy: (strategy,) for strategy in cells
    }


def test_step_time_parts_add_up_to_the_step(tmp_path: Path) -> None:
    metrics = {
        "step_seconds": 0.100,
        "data_seconds": 0.005,
        "forward_seconds": 0.030,
        "backward_seconds": 0.050,
        "optimizer_seconds": 0.010,
        "exposed_communication_seconds": 0.018,
    }
    run = [invented_trial("ddp", 2, metrics=metrics)]
    panel = figures_by_name(store_and_compare(tmp_path, run))["step-time"].panels[0]
    parts = {series.name: series.y[0] for series in panel.series}
    assert parts == {
        "computing": pytest.approx(77.0),
        "input": pytest.approx(5.0),
        "communication": pytest.approx(18.0),
        "slow steps": pytest.approx(1000 * 6.25 / 39 - 100),
    }


def test_loss_and_accuracy_by_epoch_and_by_time(tmp_path: Path) -> None:
    ranks = (two_epoch_rank(0), two_epoch_rank(1, losses=(2.5, 1.5)))
    figures = figures_by_name(store_and_compare(tmp_path, [invented_trial("ddp", 2, ranks=ranks)]))
    by_epoch, by_time = (series_named(p, "ddp") for p in figures["train-loss"].panels)
    assert by_epoch.x == (1.0, 2.0)
    assert by_epoch.y == by_time.y == pytest.approx((2.0, 1.0))
    assert by_time.x == pytest.approx((4.0, 8.0))
    for name, y in (
        ("accuracy-top1", (50.0, 75.0)),
        ("validation-loss", (0.75, 0.25)),
        ("epoch-seconds", (4.0, 4.0)),
    ):
        assert series_named(figures[name].panels[0], "ddp").y == pytest.approx(y)
    assert len(figures["epoch-seconds"].panels) == 1
    assert "map" not in figures


def test_a_row_that_diverges_makes_the_loss_logarithmic(tmp_path: Path) -> None:
    wild = (
        two_epoch_rank(0, losses=(9.0, 50.0)),
        two_epoch_rank(1, losses=(9.0, 50.0)),
    )
    run = [
        invented_trial("ddp", 2, ranks=(two_epoch_rank(0), two_epoch_rank(1))),
        invented_trial("ps-async", 2, ranks=wild),
    ]
    figures = figures_by_name(store_and_compare(tmp_path / "real", run))
    assert all(panel.y_logarithmic for panel in figures["train-loss"].panels)
    assert not any(panel.y_logarithmic for panel in figures["accuracy-top1"].panels)
    assert "scaling" not in figures, "there is one number of ranks"
    made_up = [trial.model_copy(update={"synthetic": True}) for trial in run]
    figures = figures_by_name(store_and_compare(tmp_path / "made-up", made_up))
    assert "train-loss" in figures
    assert not {"accuracy-top1", "validation-loss"} & set(figures)


@pytest.mark.parametrize(
    ("staleness", "x", "y"),
    [
        ([{"0": 6, "1": 3, "3": 1}, {"0": 10}], range(4), {0: 80.0, 1: 15.0, 2: 0.0, 3: 5.0}),
        ([{"0": 1, "1": 1, "39": 2}], range(0, 40, 2), {0: 50.0, 1: 0.0, -1: 50.0}),
    ],
    ids=["of all repeats", "in bins where it is much"],
)
def test_staleness_is_a_fraction_of_all_gradients(
    tmp_path: Path, staleness: list[dict[str, int]], x: range, y: dict[int, float]
) -> None:
    run = [
        invented_trial("ps-async", 1, repeat, ranks=(invented_rank(0), server_record(1, counts)))
        for repeat, counts in enumerate(staleness)
    ]
    panel = figures_by_name(store_and_compare(tmp_path, run))["staleness"].panels[0]
    assert panel.series[0].x == tuple(x)
    assert {at: panel.series[0].y[at] for at in y} == pytest.approx(y)


def test_network_and_cpu_are_rates_between_samples(tmp_path: Path) -> None:
    samples = [
        sample_line(-1.0, sent=0, cpu={0: 0.0, 1: 0.0}),
        sample_line(0.5, sent=1e6, cpu={0: 0.5, 1: 0.25}),
        sample_line(2.5, sent=9e6, cpu={0: 1.5, 1: 1.25}),
        sample_line(2.51, sent=9e6, cpu={0: 1.5, 1: 1.25}),  # too close to say anything
        sample_line(4.5, sent=9e6, cpu={0: 3.5, 1: 1.25}),
        sample_line(30.0, sent=9e9, cpu={0: 90.0, 1: 90.0}),  # after the training
    ]
    run = store_and_compare(tmp_path, [invented_trial("ddp", 2)], samples=lambda _: samples)
    figures = figures_by_name(run)
    network, cpu = figures["network-and-cpu"].panels
    assert network.y_label == "Network, sent (MB/s)"
    assert network.series[0].x == pytest.approx((1.5, 3.5))
    assert network.series[0].y == pytest.approx((4.0, 0.0))
    assert cpu.series[0].y == pytest.approx((100.0, 100.0))
    assert "gpu" not in figures


def test_a_recipe_of_steps_has_its_loss_by_step(tmp_path: Path) -> None:
    trial = invented_trial("ddp", 2)
    recipe = {**trial.trial["recipe"], "epochs": None, "steps": 3}
    ranks = tuple(rank.model_copy(update={"tokens": 39 * 10**6}) for rank in trial.ranks)
    stepped = trial.model_copy(
        update={"trial": {**trial.trial, "recipe": recipe}, "ranks": ranks}
    )  # 39 measured steps
    lines = [
        {"rank": rank, "step": step, "loss": loss, "samples": samples, "measured": True}
        | {"started_at_seconds": 100.0 + rank + 2 * step, "step_seconds": 1.0}
        for rank, samples, losses in ((0, 32, (4.0, 2.0)), (1, 96, (8.0, 6.0)))
        for step, loss in enumerate(losses)
    ]
    figures = figures_by_name(store_and_compare(tmp_path, [stepped], steps=lambda _: lines))
    assert "train-loss" not in figures
    lines_drawn = [panel.series[0] for panel in figures["loss-by-step"].panels]
    assert [line.x for line in lines_drawn] == [(1, 2), (2.0, 4.0), (2.0, 4.0)]
    assert all(line.y == pytest.approx((7.0, 5.0)) for line in lines_drawn)


def test_other_conditions_stand_in_their_own_panels(tmp_path: Path) -> None:
    run = [
        invented_trial(
            strategy,
            size,
            precision=precision,
            id=f"{strategy}-{precision}",
            ranks=tuple(map(two_epoch_rank, range(size))),
        )
        for precision in ("bf16", "fp32")
        for strategy, size in (("single", 1), ("ddp", 2))
    ]
    figures = figures_by_name(store_and_compare(tmp_path, run))
    assert [panel.title for panel in figures["throughput"].panels] == ["bf16", "fp32"]
    loss = figures["train-loss"].panels
    assert [panel.title for panel in loss] == ["bf16", "bf16", "fp32", "fp32"]
    assert all({series.name for series in panel.series} == {"single", "ddp"} for panel in loss)


def test_single_rank_strategies_are_in_every_panel(tmp_path: Path) -> None:
    run = [
        invented_trial(strategy, size, ranks=tuple(map(two_epoch_rank, range(size))))
        for strategy, size in (("single", 1), ("ddp", 2), ("ddp", 4))
    ]
    panels = figures_by_name(store_and_compare(tmp_path, run))["train-loss"].panels
    assert [panel.title for panel in panels] == ["2 ranks", "2 ranks", "4 ranks", "4 ranks"]
    assert all(series_named(panel, "single").y for panel in panels)


def test_without_a_result_there_is_no_figure(tmp_path: Path) -> None:
    failed = invented_trial(outcome=Outcome.FAILED, failure=Failure(reason="it fell over"))
    assert figures_by_name(store_and_compare(tmp_path, [failed])) == {}
    assert figures_by_name(compare([])) == {}


def test_the_caption_counts_panels_that_are_left_out(tmp_path: Path) -> None:
    ranks = (two_epoch_rank(0), two_epoch_rank(1))
    run = [
        invented_trial("ddp", 2, varied={"recipe.global_batch": 2**number}, ranks=ranks)
        for number in range(14)
    ]
    figures = figures_by_name(store_and_compare(tmp_path, run))
    assert max(len(figure.panels) for figure in figures.values()) == 12
    assert "2 more panels" in figures["epoch-seconds"].caption


def row_of(path: Path, **metrics: float | None) -> Row:
    return store_and_compare(path, [invented_trial("ddp", 2, metrics=metrics)]).rows[0]


def test_thinning_keeps_ends_and_extremes() -> None:
    points = [(float(x), float(x % 7)) for x in range(10_000)]
    points[4321] = (4321.0, 99.0)
    points[7654] = (7654.0, -99.0)
    found = thinned(points)
    assert len(found.x) <= MAX_POINTS
    assert (found.x[0], found.x[-1]) == (0.0, 9999.0)
    assert {99.0, -99.0} <= set(found.y)
    assert list(found.x) == sorted(found.x)
    assert set(zip(found.x, found.y, strict=True)) <= set(points)


def test_broken_raw_files_give_nothing(tmp_path: Path) -> None:
    row = row_of(tmp_path)
    folder = tmp_path / "trials" / "ddp-2-0"
    (folder / "samples.jsonl").write_bytes(b'\xff{"at_seconds": \n[1]\n{"at_seconds": 1e9}\n')
    assert sampled(row)["cpu_percent"].x == ()
    (folder / "samples.jsonl").unlink()
    (folder / "steps.jsonl").unlink()
    assert sampled(row) == {}
    assert loss_curve(row).by_step.x == ()


def test_epochs_have_whole_ticks_and_fractions_a_linear_axis(tmp_path: Path) -> None:
    quality = (
        {"accuracy_top1": 0.001, "recall_at_5": 0.02},
        {"accuracy_top1": 0.9, "recall_at_5": 0.4},
    )

    def rank(number: int) -> RankRecord:
        made = two_epoch_rank(number)
        pairs = zip(made.epochs, quality, strict=True)
        epochs = tuple(epoch.model_copy(update={"quality": values}) for epoch, values in pairs)
        return made.model_copy(update={"epochs": epochs, "better": {"recall_at_5": "higher"}})

    trial = invented_trial("ddp", 2, ranks=(rank(0), rank(1)))
    figures = figures_by_name(store_and_compare(tmp_path, [trial]))
    by_epoch = figures["accuracy-top1"].panels[0]
    assert not by_epoch.y_logarithmic, "a factor of 900 between two shares is no reason"
    assert by_epoch.y_from_zero
    assert _x_channel(by_epoch)["axis"]["values"] == [1, 2]
    own = figures["recall-at-5"].panels[0]
    assert series_named(own, "ddp").y == pytest.approx((0.02, 0.4))
    assert not own.y_logarithmic, "only what may diverge has a logarithmic axis"
    steps = replace(by_epoch, series=(replace(by_epoch.series[0], x=(3.0, 3000.0)),))
    assert "values" not in _x_channel(steps)["axis"], "the library chooses round steps"


def test_an_interface_has_the_same_style_in_every_panel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {"single": ["lo"], "ddp": ["eth0", "lo"]}

    def interfaces(entry: Entry) -> dict[str, Any]:
        sent = SimpleNamespace(over_time=OverTime(x=(0.0, 1.0), y=(1e6, 1e6)))
        none = SimpleNamespace(over_time=OverTime())
        return dict.fromkeys(names[entry.row.strategy], SimpleNamespace(sent=sent, errors=none))

    monkeypatch.setattr(over_time, "_interfaces", interfaces)
    comparison = store_and_compare(
        tmp_path, [invented_trial("single", 1), invented_trial("ddp", 2)]
    )
    (figure,) = over_time.interface_figures(groups_of(comparison.rows))
    styles = {(line.name, line.style) for panel in figure.panels for line in panel.series}
    assert len(styles) == len(figure.legend) == 2


def test_each_rank_has_a_running_median_over_its_readings(tmp_path: Path) -> None:
    """A reading in 30 is an outlier: the faint line has it, the median does not."""
    seconds = [number / 5 for number in range(30)]
    threads = {2.0: 99, 20.0: 50}  # 20 s are after the training
    samples = [
        sample_line(second, sent=0, cpu={0: 0.0, 1: 0.0}, threads=threads.get(second, 7))
        for second in (*seconds, 20.0)
    ]
    trial = invented_trial("ddp", 2)
    run = store_and_compare(tmp_path, [trial], samples=lambda _: samples)
    (panel,) = figures_by_name(run)["threads-by-rank"].panels
    assert [(s.name, s.style, s.raw) for s in panel.series] == [
        ("rank 0", 0, False),
        ("rank 0", 0, True),
        ("rank 1", 1, False),
        ("rank 1", 1, True),
    ]
    smooth, readings = panel.series[:2]
    assert set(smooth.y) == {7.0}
    assert max(y for y in readings.y if y is not None) == 99.0
    assert smooth.x == readings.x == pytest.approx(seconds)
    assert "rss-by-rank" not in figures_by_name(run), "no sample has it"


def test_a_server_among_the_ranks_is_named(tmp_path: Path) -> None:
    """Rates of a disturbed trial are marked, threads are not."""
    others = StabilityFinding(kind=StabilityKind.OTHER_PROCESSES, text="busy", severity=0.8)
    ranks = (invented_rank(0), invented_rank(1), server_record(2, {"0": 1}))
    trial = invented_trial("ps-sync", 2, ranks=ranks, stability=(others,))
    samples = [
        sample_line(second, sent=1e6 * second, cpu=dict.fromkeys(range(3), second), threads=7)
        for second in (0.0, 1.0, 2.0)
    ]
    figures = figures_by_name(store_and_compare(tmp_path, [trial], samples=lambda _: samples))
    (panel,) = figures["threads-by-rank"].panels
    assert [series.name for series in panel.series] == ["rank 0", "rank 1", "rank 2 (server)"]
    warned = {name: bool(figures[name].warning) for name in ("threads-by-rank", "network-and-cpu")}
    assert warned == {"threads-by-rank": False, "network-and-cpu": True}


def test_few_readings_have_no_median() -> None:
    points = [(float(at), float(at % 2)) for at in range(2 * SMOOTHED_READINGS - 1)]
    assert smoothed(points).smooth is None
    more = smoothed([*points, (99.0, 1.0)], median)
    x, y = present(more.smooth)
    assert x == more.x
    assert y[4] == 0.0, "five of the readings 0 to 8 are 0"
    assert y[5] == 1.0
    bursts = present(smoothed([*points, (99.0, 1.0)]).smooth)
    assert bursts[1][4] == pytest.approx(4 / 9), "what was sent in bursts is not 0"


def test_the_network_of_each_rank_is_what_it_wrote_or_what_its_nvlinks_sent(tmp_path: Path) -> None:
    samples = [
        sample_line(
            second,
            sent=0,
            cpu={0: 0.0, 1: 0.0},
            written_bytes=int(second * 3e6),
            gpus=[{"uuid": "GPU-1", "nvlink_sent_bytes": int(second * 5e6)}],
        )
        for second in (0.5, 1.5, 2.5)
    ]
    trial = invented_trial("ddp", 2)
    on_gpu = {"device": "cuda:0", "device_uuids": ("GPU-1",)}
    ranks = (trial.ranks[0], trial.ranks[1].model_copy(update=on_gpu))
    trials = [trial.model_copy(update={"ranks": ranks}), invented_trial("single", 1)]
    run = store_and_compare(tmp_path, trials, samples=lambda _: samples)
    (panel,) = figures_by_name(run)["network-by-rank"].panels
    assert panel.title == "ddp, 2 ranks", "one rank alone sends to nobody"
    assert panel.y_label == "Sent (MB/s)"
    assert [line.y for line in panel.series] == [pytest.approx((3, 3)), pytest.approx((5, 5))]


def test_lines_and_points_that_hide_each_other_are_named(tmp_path: Path) -> None:
    wild = tuple(two_epoch_rank(number, losses=(9.0, 50.0)) for number in (0, 1))
    same = (two_epoch_rank(0), two_epoch_rank(1))
    run = [
        invented_trial(name, 2, ranks=wild if name == "ps-async" else same)
        for name in ("ddp", "fsdp", "ps-async")
    ]
    figures = figures_by_name(store_and_compare(tmp_path, run))
    loss = figures["train-loss"]
    assert "Lines on one another: ddp and fsdp." in loss.caption
    assert "Points on one another: ddp, fsdp and ps-async." in figures["speed-and-memory"].caption
    # One of three diverges: the others keep their axis, and the caption has its values.
    assert not any(panel.y_logarithmic for panel in loss.panels)
    assert all(panel.y_bounds and panel.y_bounds[1] < 2 for panel in loss.panels)
    assert "Cut at the end of the axis: ps-async (up to 50)." in loss.caption


def test_there_are_no_figures_of_unnamed_points_or_of_time_over_time(tmp_path: Path) -> None:
    """Strategies of one number of ranks would be one column of points."""
    sizes = {"single": 1, "ddp": 2, "fsdp": 2}
    run = [
        invented_trial(name, size, ranks=tuple(map(two_epoch_rank, range(size))))
        for name, size in sizes.items()
    ]
    names = set(figures_by_name(store_and_compare(tmp_path, run)))
    assert "throughput" in names
    assert not {"scaling", "best-by-axis", "elapsed-seconds"} & names
