"""A study in the report: its curves on the axes of the measured ones, its tables, its warning."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from shardmark.base.results.schema import StabilityFinding, StabilityKind, TrialResult
from shardmark.base.results.store import load_run
from shardmark.bench.analysis.compare.comparison import compare
from shardmark.bench.report.figures import Figure, Panel, figures_of
from shardmark.bench.report.figures.drawing import draw, figure_svg, look_of, panel_spec
from shardmark.cli import main
from shardmark.extras.studies.against import Against, set_against
from shardmark.extras.studies.against_view import against_tables
from shardmark.extras.studies.published_figure import published_figures
from shardmark.extras.studies.study import load_study
from tests.golden.invented import detection_trial, write_run
from tests.unit.bench.report.figures.test_content import series_named

STRATEGIES = ("ddp", "fsdp", "zero-1")
OTHERS = StabilityFinding(
    kind=StabilityKind.OTHER_PROCESSES, text="other programs used 80 % of the CPU", severity=0.8
)


def trials(*, disturbed: bool = False) -> list[TrialResult]:
    made = [detection_trial(name, 2, repeat) for name in STRATEGIES for repeat in (0, 1)]
    return (
        [trial.model_copy(update={"stability": (OTHERS,)}) for trial in made] if disturbed else made
    )


def study_figures(study: str, *folders: Path) -> tuple[Against, dict[str, Figure]]:
    comparison = compare([load_run(folder) for folder in folders])
    against = set_against(comparison, load_study(study))
    figures = (*figures_of(comparison), *published_figures(against))
    return against, {figure.name: figure for figure in figures}


def test_published_curves_are_dashed_in_the_measured_ones_colours(tmp_path: Path) -> None:
    _, figures = study_figures("lamsal-2025", write_run(tmp_path / "a", trials()))
    two, four = figures["published-epoch-seconds"].panels
    assert (two.title, four.title) == ("2 ranks", "4 ranks")
    assert two.y_range == four.y_range, "one axis for both"
    published, measured = series_named(two, "zero-1, published"), series_named(two, "zero-1")
    assert published.y == (580, 579, 578, 578, 578)
    assert (published.dashed, measured.dashed) == (True, False)
    assert look_of(published.style).colour == look_of(measured.style).colour
    assert len(measured.y) == 2
    assert {series.name for series in four.series} == {f"{name}, published" for name in STRATEGIES}
    assert {"published-train-loss", "published-map", "claims"} <= figures.keys()


def test_curves_of_two_runs_have_names_and_looks_of_their_own(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / name, trials()) for name in ("a100", "a10g")]
    _, figures = study_figures("lamsal-2025", *folders)
    panel = figures["published-map"].panels[0]
    names = {series.name: look_of(series.style) for series in panel.series if not series.dashed}
    assert names.keys() == {f"{name}, {run}" for name in STRATEGIES for run in ("a100", "a10g")}
    assert len(set(names.values())) == len(names)


def test_values_without_epochs_are_drawn_as_ratios(tmp_path: Path) -> None:
    workload = {"model": "resnet18"}
    made = [
        detection_trial(name, ranks, rate=rate, workload=workload)
        for name, ranks, rate in (("single", 1, 100.0), ("ddp", 2, 50.0), ("fsdp", 2, 80.0))
    ]
    _, figures = study_figures("asu-fsdp-2024", write_run(tmp_path / "a", made))
    time, peak, *others = figures["published-ratios"].panels
    assert len(others) == 2, "the other model has published values alone"
    values = {series.name: series.y[0] for series in time.series if series.style == "reference"}
    assert values["FSDP with 2 GPUs, publ."] == pytest.approx(32 / 30.23)
    measured = {str(series.x[0]): series.y[0] for series in time.series}
    assert measured["FSDP with 2 GPUs, meas."] == pytest.approx(1.25)
    assert measured["2 GPUs with ddp, meas."] == pytest.approx(2)
    published = {str(series.x[0]): series.y[0] for series in peak.series}
    assert published["FSDP with 2 GPUs, publ."] == pytest.approx(0.27 / 0.74)


def test_claims_are_drawn_with_their_ranges(tmp_path: Path) -> None:
    made = [detection_trial(name, 4, repeat) for name in ("ddp", "fsdp") for repeat in (0, 1)]
    _, figures = study_figures("ovi-2025", write_run(tmp_path / "a", made))
    panels = {panel.title: panel for panel in figures["claims"].panels}
    claimed, measured = panels["FSDP takes 4 to 6 times less peak memory"].series
    assert (claimed.y, claimed.low, claimed.high) == ((0.25,), (0.1667,), (0.25,))
    assert measured.x == ("fsdp, over ddp on 4 ranks",)
    assert measured.y == pytest.approx((1.0,))


@pytest.mark.parametrize("disturbed", [False, True])
def test_an_image_has_title_caption_and_warning(*, disturbed: bool, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", trials(disturbed=disturbed))
    against, figures = study_figures("lamsal-2025", folder)
    notes = " ".join(against_tables(against)[0].notes)
    assert ("Disturbed by other work" in notes) is disturbed
    figure = figures["published-epoch-seconds"]
    (drawing,) = draw([figure])
    svg = figure_svg(drawing)
    assert "Time of an epoch: Lamsal (2025) and measured" in svg
    assert "4 x NVIDIA A6000" in svg
    assert ("Warning: other work disturbed" in svg) is disturbed


def test_other_work_marks_times_alone(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", trials(disturbed=True))
    _, figures = study_figures("lamsal-2025", folder)

    def marked(panel: Panel) -> bool:
        return any(any(series.faint) for series in panel.series)

    for time in ("epoch-seconds", "published-epoch-seconds", "throughput", "step-time"):
        assert all(marked(panel) for panel in figures[time].panels[:1]), time
    for value in ("published-map", "published-train-loss", "claims"):
        assert not any(map(marked, figures[value].panels)), "times of claims are not known"
    by_epoch, by_time = figures["map"].panels
    assert (marked(by_epoch), marked(by_time)) == (False, True)
    assert figures["published-map"].warning == ""
    assert "times that other work disturbed are left out" in figures["claims"].caption


def test_a_claim_on_two_and_on_four_ranks_has_one_axis(tmp_path: Path) -> None:
    made = [
        detection_trial(name, ranks, repeat, rate=rate + repeat)
        for name, ranks, rate in (
            ("ddp", 2, 100.0),
            ("ddp", 4, 100.0),
            ("fsdp", 2, 50.0),
            ("fsdp", 4, 20.0),
        )
        for repeat in (0, 1)
    ]
    _, figures = study_figures("lamsal-2025", write_run(tmp_path / "a", made))
    panels = {panel.title: panel for panel in figures["claims"].panels}
    two, four = (panels[f"FSDP is slower than DDP on {n} GPUs"] for n in (2, 4))
    assert two.y_range == four.y_range
    ends = [
        panel_spec(panel)["layer"][0]["encoding"]["x"]["scale"]["domain"] for panel in (two, four)
    ]
    assert ends[0] == ends[1]
    assert two.y_label == "Ratio: time for the same samples"


def test_the_page_has_the_study(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", trials())
    out = tmp_path / "page.html"
    options = ["--out", str(out), "--against", "lamsal-2025", "--latex"]
    assert main(["report", str(folder), *options]) == 0
    tables = (tmp_path / "page.tex").read_text(encoding="utf-8")
    assert "% Claims of lamsal-2025\n" in tables
    assert tables.count(r"\begin{tabular}") > 2
    page = out.read_text(encoding="utf-8")
    for text in (
        "Against Lamsal (2025)",
        "Section 3.2, item 7: FSDP",
        "cannot on so few ranks",
        "What lamsal-2025 cannot mean",
        'id="figure-published-map"',
    ):
        assert text in page
    assert page.count('id="figure-published-map"') == 1
    with Image.open(tmp_path / "page-figures" / "published-map.png") as image:
        assert image.size[0] > 1000


def test_an_unknown_study_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path / "run", trials())
    assert main(["report", str(folder), "--against", "lamsal"]) == 2
    error = capsys.readouterr().err
    assert "--against" in error
    assert "lamsal-2025" in error
