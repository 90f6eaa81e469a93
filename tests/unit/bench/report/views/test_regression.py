"""Two runs of one experiment: shown changes, what is not decided, and a code for CI."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardmark.base.errors import InputError
from shardmark.base.results.fingerprint import Fingerprint, SourceRecord
from shardmark.base.results.schema import Failure, Outcome, TrialResult
from shardmark.base.results.store import StoredRun, load_run
from shardmark.bench.analysis.compare import regression as regression_module
from shardmark.bench.analysis.compare.comparison import Comparison, compare
from shardmark.bench.analysis.compare.regression import Regression, find_regressions
from shardmark.bench.analysis.compare.verdicts import METRIC
from shardmark.bench.report.views.regression import regression_lines, regression_table
from shardmark.cli import main
from tests.golden.invented import invented_trial, write_run
from tests.json_fields import problems_of

STEADY = (100.0, 100.1, 99.9)
Rates = Mapping[str, Sequence[float]]


def trials(rates: Rates, **fields: Any) -> list[TrialResult]:
    """On two ranks each; no rate is a trial that failed."""
    failed: dict[str, Any] = {
        "outcome": Outcome.FAILED,
        "failure": Failure(reason="rank 1 was killed"),
    }
    return [
        invented_trial(name, 2, repeat, metrics={"samples_per_second": rate}, **fields)
        for name, each in rates.items()
        for repeat, rate in enumerate(each)
    ] + [invented_trial(name, 2, **failed, **fields) for name, each in rates.items() if not each]


def written(folder: Path, rates: Rates, environment: Any = None, **fields: Any) -> str:
    return str(write_run(folder, trials(rates, **fields), environment=environment))


def regression(before: Rates, after: Rates, threshold: float = 0.02) -> Regression:
    runs = [StoredRun(path=Path("none"), trials=tuple(trials(each))) for each in (before, after)]
    return find_regressions(*runs, threshold=threshold)


@pytest.mark.parametrize(
    ("before", "after", "change"),
    [
        pytest.param(STEADY, (80.0, 80.1, 79.9), "slower", id="a fifth"),
        pytest.param(STEADY, (120.0, 120.1, 119.9), "faster", id="a gain"),
        pytest.param(STEADY, (100.0, 99.9, 100.1), "same", id="shown to be the same"),
        pytest.param(STEADY, (99.0, 99.1, 98.9), "same", id="one percent, shown, is too little"),
        pytest.param(STEADY, (60.0, 140.0, 100.0), "not decided", id="noise"),
        pytest.param((99.0, 101.0), (88.0, 94.0), "not decided", id="two noisy repeats"),
        pytest.param(STEADY, (50.0,), "not decided", id="one repeat shows nothing"),
        pytest.param((1.0, 1.0), (0.9, 0.9), "slower", id="no noise at all"),
        pytest.param(STEADY, (), "fails now", id="it fails"),
        pytest.param((), STEADY, "works now", id="it failed"),
    ],
)
def test_a_cell_s_change_is_classified(
    before: Sequence[float], after: Sequence[float], change: str
) -> None:
    steady = {"fsdp": STEADY}
    result = regression({"ddp": before, **steady}, {"ddp": after, **steady})
    cells = {cell.after.strategy: cell for cell in result.cells}
    assert (cells["ddp"].change, cells["fsdp"].change) == (change, "same")
    assert bool(result.regressions) is (change in ("slower", "fails now"))
    first = regression_lines(result)[0]
    assert first.startswith("REGRESSION: ddp on 2 ranks") is bool(result.regressions)
    assert any("Not decided: 1 of 2" in line for line in regression_lines(result)) is (
        change == "not decided"
    )
    assert regression_table(result).cells("ratio")


def test_a_loss_that_is_no_longer_finite_is_a_regression() -> None:
    bad = {"nonfinite_steps": 20, "first_nonfinite": (2, "infinite")}
    ranks = tuple(rank.model_copy(update=bad) for rank in invented_trial("ddp", 2).ranks)
    now = trials({"ddp": STEADY}, ranks=ranks)
    runs = [StoredRun(path=Path("none"), trials=tuple(t)) for t in (trials({"ddp": STEADY}), now)]
    (cell,) = find_regressions(*runs, threshold=0.02).cells
    assert cell.change == "fails now"
    assert cell.reason == "the loss is infinite from step 3 on"


def test_the_interval_is_welch_s() -> None:
    """That of `scipy.stats.ttest_ind`, on logarithms; its degrees are not rounded down."""
    before, after = (100.0, 103.0, 98.0, 101.0), (90.0, 92.0, 91.0, 95.0)
    (cell,) = regression({"ddp": before}, {"ddp": after}).cells
    assert cell.ratio is not None
    assert (cell.ratio.low, cell.ratio.high) == pytest.approx((0.880989, 0.951119), rel=0.005)
    assert cell.ratio.value == pytest.approx(0.915382625602275)


def test_equal_runs_seldom_regress(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six cells of one law: in at most 5 % of the runs any of them does; 60 draws, 3 sigma."""
    rng = random.Random(0)
    run = StoredRun(path=Path("none"), trials=tuple(trials({f"s{n}": STEADY for n in range(6)})))
    compared = compare([run])

    def drawn(_: Sequence[StoredRun]) -> Comparison:
        """Rows are made once: trials are costly to check."""
        rates = [[100 * rng.lognormvariate(0, 0.05) for _ in range(4)] for _ in compared.rows]
        pairs = zip(compared.rows, rates, strict=True)
        rows = (replace(row, values={METRIC: dict(enumerate(each))}) for row, each in pairs)
        return replace(compared, rows=tuple(rows))

    monkeypatch.setattr(regression_module, "compare", drawn)
    found = (find_regressions(run, run, threshold=0.02).regressions for _ in range(60))
    assert sum(map(bool, found)) / 60 <= 0.05 + 3 * (0.05 * 0.95 / 60) ** 0.5


def test_differences_of_the_runs_have_notes(tmp_path: Path) -> None:
    versions = [{"torch": "2.14.0", "numpy": "2.4"}, {"torch": "2.15.0", "numpy": "2.4"}]
    runs: list[StoredRun] = []
    for number, packages in enumerate(versions):
        environment = {"packages": packages, "git": {"commit": f"{number}" * 40}, "date": number}
        rates = {"ddp": STEADY, f"only{number}": STEADY}
        runs.append(load_run(Path(written(tmp_path / str(number), rates, environment))))
    result = find_regressions(*runs, threshold=0.02)
    assert result.differences == {
        "packages.torch": ("2.14.0", "2.15.0"),
        "git.commit": ("0" * 12, "1" * 12),
    }
    notes = " ".join(regression_table(result).notes)
    for said in ("torch 2.14.0 -> 2.15.0", "Only before: only0 on", "Only after: only1 on"):
        assert said in notes


def test_the_exit_code_reports_regressions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = written(tmp_path / "before", {"ddp": STEADY, "fsdp": STEADY})
    slower = written(tmp_path / "after", {"ddp": (90.0, 90.1, 89.9), "fsdp": STEADY})
    again = written(tmp_path / "again", {"ddp": STEADY, "fsdp": STEADY})
    assert main(["compare", before, again, "--regression"]) == 0
    assert capsys.readouterr().out.startswith("No regression beyond 2 %")
    assert main(["compare", before, slower, "--regression"]) == 1
    text = capsys.readouterr().out
    assert text.startswith("REGRESSION: ddp on 2 ranks, 0.900x")
    assert max(map(len, text.splitlines())) <= 80
    assert main(["compare", before, slower, "--regression", "--threshold", "15"]) == 0
    capsys.readouterr()
    assert main(["compare", before, slower, "--regression", "--format", "json"]) == 1
    printed = json.loads(capsys.readouterr().out)
    assert problems_of("Regression", printed) == []
    document = printed["regression"]
    assert (document["regression"], document["threshold"]) == (True, 0.02)
    assert document["cells"][0]["ratio"]["value"] == pytest.approx(0.9, rel=0.01)


def test_undecided_cells_have_an_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    noisy = (63.8, 99.0, 110.0)
    before = written(tmp_path / "before", {"ddp": STEADY})
    after = written(tmp_path / "after", {"ddp": noisy})
    assert main(["compare", before, after, "--regression"]) == 2
    text = " ".join(capsys.readouterr().out.split())
    assert text.startswith("Nothing is decided: a change of 2 % is neither shown nor excluded")
    assert "3 repeats show changes from about" in text
    mixed = written(tmp_path / "mixed", {"ddp": noisy, "fsdp": STEADY})
    steady = written(tmp_path / "steady", {"ddp": STEADY, "fsdp": STEADY})
    assert main(["compare", steady, mixed, "--regression"]) == 2, "one of two is not decided"
    assert main(["compare", steady, mixed, "--regression", "--min-decided", "50"]) == 0
    assert main(["compare", steady, mixed, "--regression", "--min-decided", "51"]) == 2
    assert main(["compare", steady, mixed, "--min-decided", "50"]) == 2, "without --regression"


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        pytest.param(STEADY, (98.0, 101.5, 100.0), "6 repeats or --threshold 5 would", id="same"),
        pytest.param((99.0, 101.0, 100.0), (93.0, 97.0, 95.0), "--threshold 12", id="5 % slower"),
        pytest.param((90.0, 120.0, 100.0), (50.0, 80.0, 68.0), "about 4 repeats would", id="0.63"),
        pytest.param((60.0, 140.0, 99.0), (64.0, 130.0, 90.0), "quieter machines", id="wild"),
    ],
)
def test_the_answer_names_what_decides_a_noisy_cell(
    before: tuple[float, ...], after: tuple[float, ...], said: str
) -> None:
    """The advice holds: the named threshold decides, and so do repeats that scatter as much."""
    compared = regression({"ddp": before}, {"ddp": after})
    surer = compared.advice()
    assert surer is not None
    assert not compared.decided
    assert said in surer
    if (threshold := re.search(r"--threshold (\d+)", surer)) is not None:
        percent = int(threshold[1])
        assert percent < 100
        assert regression({"ddp": before}, {"ddp": after}, percent / 100).decided
    if (repeats := re.search(r"about (\d+) repeats", surer)) is not None:
        times = -(-int(repeats[1]) // len(before))
        assert regression({"ddp": before * times}, {"ddp": after * times}).decided
    assert regression({"ddp": STEADY}, {"ddp": STEADY}).advice() is None


def test_changed_code_is_named() -> None:
    """Runs in the same environment may still differ."""
    sources = [{"task": SourceRecord(file="task.py", sha256=sha)} for sha in ("a", "b")]
    runs = [
        StoredRun(
            path=Path("none"),
            trials=tuple(trials({"ddp": STEADY})),
            fingerprint=Fingerprint(sources=source),
        )
        for source in sources
    ]
    notes = " ".join(regression_table(find_regressions(*runs, threshold=0.02)).notes)
    assert "Changed between the runs: the source of task.py." in notes
    same = regression_table(find_regressions(runs[0], runs[0], threshold=0.02)).notes
    assert "Code, data and environment are the same." in same
    more = Fingerprint(sources={**sources[0], "b": SourceRecord(file="b.py", sha256="3")})
    wider = replace(runs[0], fingerprint=more)
    for pair, said in (((runs[0], wider), "new"), ((wider, runs[0]), "gone")):
        notes = " ".join(regression_table(find_regressions(*pair, threshold=0.02)).notes)
        assert f"Changed between the runs: the source of b.py ({said})." in notes
    bare = replace(runs[0], fingerprint=None)
    unknown = regression_table(find_regressions(bare, runs[1], threshold=0.02)).notes
    assert "Code and data are not compared: a run has no readable fingerprint.json." in unknown
    assert not any("are the same" in note for note in unknown)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--regression", "--view", "scaling"], "--view scaling"),
        (["--threshold", "5"], "--threshold"),
        (["--regression", "--threshold", "-1"], "threshold"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], said: str
) -> None:
    run, again = (written(tmp_path / name, {"ddp": STEADY}) for name in ("run", "again"))
    assert main(["compare", run, again, *options]) == 2
    assert said in capsys.readouterr().err
    assert main(["compare", run, "--regression"]) == 2
    assert "two" in capsys.readouterr().err


def test_runs_of_one_repeat_or_other_training_are_refused() -> None:
    with pytest.raises(InputError, match=r"measure\.repeats"):
        regression({"ddp": (100.0,)}, {"ddp": (50.0,)})
    made = invented_trial("ddp", 2)
    recipe = {**made.trial["recipe"], "global_batch": 128}
    other_text = tuple(
        rank.model_copy(update={"corpora": {"stdlib": "new"}}) for rank in made.ranks
    )
    text = tuple(rank.model_copy(update={"corpora": {"stdlib": "old"}}) for rank in made.ranks)
    for ranks, fields, message in (
        (text, {"ranks": other_text}, r"new-run: .* stdlib than old-run"),
        (
            text,
            {"trial": {**made.trial, "recipe": recipe}},
            r"global_batch 128, and before it was 64",
        ),
    ):
        before = StoredRun(path=Path("old-run"), trials=(made.model_copy(update={"ranks": ranks}),))
        after = StoredRun(path=Path("new-run"), trials=(made.model_copy(update=fields),))
        with pytest.raises(InputError, match=message):
            find_regressions(before, after, threshold=0.02)
