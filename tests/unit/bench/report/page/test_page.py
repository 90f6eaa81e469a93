"""The page: what is on it, what is escaped, what it refuses."""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest

from shardmark.base.evidence.checks import Check
from shardmark.base.results.schema import (
    Failure,
    Outcome,
    RankError,
    StabilityFinding,
    StabilityKind,
    TrialResult,
)
from shardmark.base.results.store import load_run
from shardmark.base.results.verification import Cause, Verification, write_verification
from shardmark.bench.analysis.compare.comparison import compare
from shardmark.bench.analysis.compare.rows import Row
from shardmark.bench.report.figures import figures_of
from shardmark.bench.report.page.anonymous import anonymous
from shardmark.bench.report.page.page import render_page, template_text
from shardmark.bench.report.page.parts import (
    LINE_CHARACTERS,
    TAIL_BYTES,
    TAIL_LINES,
    definitions,
    facts_of,
    failed_trials,
    log_tail,
    planned_trials,
    progress_notes,
    ranks_table,
    trials_table,
    verification_tables,
)
from shardmark.cli import main
from tests import GOLDEN
from tests.golden.invented import invented_rank, invented_trial, invented_verdict, write_run

HOSTILE = "</script><script>alert(1)</script>\"'&\u2028"
ADDRESSES = {"src", "href", "data", "action", "srcset", "style"}


class Parsed(HTMLParser):
    """The page's elements, and what is inside its scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.attributes: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[tuple[str | None, str]] = []
        """The type and the content of each."""
        self.text = ""
        self._raw = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes.append((tag, dict(attrs)))
        self._raw = tag if tag in ("script", "style") else self._raw

    def handle_endtag(self, tag: str) -> None:
        if tag == self._raw:
            self._raw = ""

    def handle_data(self, data: str) -> None:
        if self._raw == "script":
            self.scripts.append((self.attributes[-1][1].get("type"), data))
        elif not self._raw:
            self.text += data

    @property
    def addresses(self) -> list[str]:
        """Whatever a browser might load or follow."""
        return [
            value or ""
            for _, values in self.attributes
            for key, value in values.items()
            if key in ADDRESSES
        ]


def page_of(folder: Path) -> Parsed:
    run = load_run(folder)
    return Parsed(render_page([run], compare([run]), (), None))


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The golden run, of which one figure is drawn: others draw all."""
    monkeypatch.setattr(
        "shardmark.bench.report.page.page.figures_of",
        lambda run, **options: figures_of(run, **options)[:1],
    )
    return Path(shutil.copytree(GOLDEN, tmp_path / "run"))


def test_only_its_own_script_and_style_run_and_nothing_is_loaded() -> None:
    page = page_of(GOLDEN)
    style, script = template_text("report.css"), template_text("report.js")
    assert [text for kind, text in page.scripts if kind is None] == [script]
    (policy,) = (
        values["content"] or ""
        for _, values in page.attributes
        if values.get("http-equiv") == "Content-Security-Policy"
    )
    assert "default-src 'none'" in policy
    for kind, text in (("script", script), ("style", style)):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}';" in policy
    assert page.addresses
    assert all(address.startswith("#") for address in page.addresses)
    assert "url(" not in style
    assert "@import" not in style


def test_failures_have_reason_remedy_and_log(tmp_path: Path) -> None:
    failure = Failure(reason=f"it broke {HOSTILE}", remedy="mend it", rank=3)
    trials = [
        invented_trial("single", 1),
        *(
            invented_trial("ddp", 2, repeat, outcome=Outcome.FAILED, failure=failure)
            for repeat in (0, 2)
        ),
    ]
    page = page_of(write_run(tmp_path / "run", trials))
    text = " ".join(page.text.split())
    for fact in (f"it broke {HOSTILE} (rank 3)", "Remedy: mend it", "Repeats: 0, 2."):
        assert " ".join(fact.split()) in text
    assert text.count("[rank 0] invented") == 2
    assert len(page.scripts) == 4, "no text has ended a script"


def test_a_disturbed_trial_has_not_failed(tmp_path: Path) -> None:
    others = StabilityFinding(kind=StabilityKind.OTHER_PROCESSES, text="busy", severity=0.8)
    trials = [
        invented_trial("ddp", 2, 0),
        invented_trial("ddp", 2, 1, stability=(others,)),
        invented_trial("ddp", 2, 2, outcome=Outcome.FAILED, failure=Failure(reason="no")),
    ]
    page = page_of(write_run(tmp_path / "run", trials))
    assert "1 of 3 trials did not end ok" in page.text


def test_missing_and_damaged_trials_are_listed(run: Path) -> None:
    (run / "trials" / "ddp-2-7").mkdir()
    (run / "trials" / "ddp-2-0" / "result.json").write_text("{")
    (run / "environment.json").write_text("[]")
    (run / "experiment.yaml").unlink()
    text = page_of(run).text
    for fact in (
        "begun without a result: 1",
        "ddp-2-0: is not whole JSON",
        f"All {len(load_run(run).trials)} trials",
        "No environment was stored",
        "experiment.yaml cannot be read",
    ):
        assert fact in text


def test_the_command_writes_page_and_figures(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(run)]) == 0
    page, figures = run / "report.html", run / "report-figures"
    told = capsys.readouterr().out
    assert str(page) in told
    assert str(figures) in told
    addresses = Parsed(page.read_text(encoding="utf-8")).addresses
    linked = {run / address for address in addresses if not address.startswith("#")}
    assert linked == set(figures.iterdir())
    assert {path.suffix for path in linked} == {".png", ".svg"}
    assert load_run(run).trials, "it is still a run"
    out = tmp_path / "new" / "mine.htm"
    command = ["report", str(run), "--no-images", "--out", str(out), "--baseline"]
    assert main([*command, "ddp"]) == 0
    assert [path.name for path in out.parent.iterdir()] == ["mine.htm"]
    addresses = Parsed(out.read_text(encoding="utf-8")).addresses
    assert all(address.startswith("#") for address in addresses)
    assert main([*command, "ddq"]) == 2


def test_an_anonymous_page_names_no_machine_no_user_and_no_path(tmp_path: Path) -> None:
    """Text, attributes and JSON are cleaned; what only looks like a path stays."""
    reason = (
        "alice's '/home/alice/data/set.pt' is missing on gpu-7 "
        'File "/home/alice/code/train.py", line 3; 12 samples/s, text/html, gpu-70'
    )
    failure = Failure(reason=reason, remedy="x", rank=0)
    failed = invented_trial("ddp", 2, outcome=Outcome.FAILED, failure=failure)
    folder = write_run(
        tmp_path / "run",
        [invented_trial("single", 1), failed],
        environment={"host": "gpu-7.lab.example", "cpu": {"model": "x"}},
    )
    stored = load_run(folder)
    shown = anonymous(render_page([stored], compare([stored]), (), None), [stored])
    for name in ("alice", "gpu-7.lab", "gpu-7 ", "/home", "train.py"):
        assert name not in shown, name
    text = Parsed(shown).text
    for kept in ("samples/s", "text/html", "gpu-70", 'File "/...", line 3', "on machine"):
        assert kept in text, kept
    script, style = template_text("report.js"), template_text("report.css")
    assert script in shown
    assert style in shown
    page = Parsed(shown)
    assert all(json.loads(content) for kind, content in page.scripts if kind is not None)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["{run}", "{run}/trials"], "2 runs and no file"),
        (["{run}", "--out", "{run}/result.json"], "its name ends in .html"),
        (["{run}", "--out", "{run}/folder.html"], "is a folder"),
        (["{run}", "--out", "{run}/experiment.yaml/a.html"], "cannot be written"),
        (["{run}/nothing"], "does not exist"),
    ],
)
def test_invalid_output_paths_are_refused(
    run: Path, arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "folder.html").mkdir()
    (run / "trials" / "trials").mkdir()
    assert main(["report", *(argument.format(run=run) for argument in arguments)]) == 2
    assert told in capsys.readouterr().err


def test_a_run_without_results_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_run(tmp_path / "run", [])
    assert main(["report", str(folder)]) == 2
    assert "no trial has a result yet" in capsys.readouterr().err
    (folder / "trials" / "a").mkdir()
    (folder / "trials" / "a" / "result.json").write_text("{}")
    assert main(["report", str(folder)]) == 2
    assert "1 damaged" in capsys.readouterr().err
    assert not (folder / "report.html").exists()


def rows_of_trials(folder: Path, *trials: TrialResult) -> tuple[Row, ...]:
    return compare([load_run(write_run(folder, trials))]).rows


HUNDRED = [f"line {number}" for number in range(100)]


@pytest.mark.parametrize(
    ("content", "shown", "cut"),
    [
        ("\n".join(HUNDRED) + "\n\n\n", HUNDRED[-TAIL_LINES:], True),
        ("one\ntwo", ["one", "two"], False),
        ("first\n" + "y" * (2 * TAIL_BYTES) + "\nlast\n", ["last"], True),
        ("\n \n", None, False),
        (None, None, False),
    ],
    ids=["many lines", "few lines", "a huge line", "nothing in it", "no log"],
)
def test_a_log_ends_with_its_last_lines(
    tmp_path: Path, content: str | None, shown: list[str] | None, cut: bool
) -> None:
    if content is not None:
        (tmp_path / "log.txt").write_text(content)
    tail = log_tail(tmp_path)
    assert (tail is None) == (shown is None)
    if tail is not None:
        assert tail.text.splitlines() == shown
        assert tail.cut is cut


def test_a_log_is_shown_without_what_moves_a_cursor(tmp_path: Path) -> None:
    (tmp_path / "log.txt").write_bytes(
        b"\x1b[1;31mred\x1b[0m \x1b]0;title\x07ok\x00\x08 \xff\n\ttab\r\n10 %\r20 %\r\n"
        + b"x" * 5000
    )
    tail = log_tail(tmp_path)
    assert tail is not None
    long = "x" * LINE_CHARACTERS + " ..."
    assert tail.text.split("\n") == ["red ok \ufffd", " tab", "20 %", long]


def test_equal_failures_are_listed_once(tmp_path: Path) -> None:
    broke = Failure(reason="it broke", remedy="mend it", rank=1)
    other = Failure(reason="it broke otherwise")
    rows = rows_of_trials(
        tmp_path / "run",
        *(
            invented_trial("ddp", 2, repeat, outcome=Outcome.FAILED, failure=failure)
            for repeat, failure in enumerate((broke, broke, other))
        ),
        invented_trial("ddp", 2, 3),
    )
    assert [
        ([trial.repeat for trial in group.trials], group.failure, len(logs))
        for _, group, logs in failed_trials(rows)
    ] == [([0, 1], broke, 2), ([2], other, 1)]


def test_the_environment_is_shown_without_paths_and_long_lists(tmp_path: Path) -> None:
    environment = {
        "host": "here",
        "date": "2026-11-22T10:00:00",
        "cpu": {"model": "EPYC", "affinity": [0, 1]},
        "python_executable": "/here",
    }
    facts = facts_of(load_run(write_run(tmp_path / "run", [], environment=environment)))
    assert (facts.host, facts.date) == ("here", "2026-11-22")
    assert "EPYC" in facts.environment
    assert not any(word in facts.environment for word in ("affinity", "/here"))


def test_planned_trials_are_counted(tmp_path: Path) -> None:
    run = load_run(write_run(tmp_path / "run", [invented_trial("single", 1)]))
    assert planned_trials(run) == 6, "single on one rank, ddp and fsdp on two; each twice"
    (note,) = progress_notes([run])
    assert note.startswith("1 of 6 planned trials")
    (run.path / "experiment.yaml").write_text("workload: 3")
    assert planned_trials(run) is None
    assert progress_notes([run]) == []


def test_every_trial_rank_and_known_metric_is_listed(tmp_path: Path) -> None:
    error = RankError(kind="exception", message="no more", at_seconds=0.0)
    failed = invented_rank(1).model_copy(update={"error": error})
    rows = rows_of_trials(
        tmp_path / "run",
        invented_trial("single", 1),
        invented_trial("ddp", 2, ranks=(invented_rank(0), failed)),
        invented_trial("fsdp", 2, outcome=Outcome.FAILED),
    )
    trials, ranks = trials_table(rows), ranks_table(rows)
    assert trials.cells("label") == ("single", "ddp", "fsdp")
    assert trials.cells("outcome") == ("ok", "ok", "failed")
    assert ranks.cells("label") == ("single", "ddp", "ddp")
    assert ranks.cells("rank") == ("0", "0", "1")
    assert ranks.cells("ended early") == ("", "", "exception: no more")
    assert ranks.cells("samples/s")[0] == "200", "1248 samples in windows of 2.75 and 3.5 seconds"
    metrics = definitions(rows).cells("metric")
    assert "samples_per_second" in metrics
    assert "mfu" not in metrics


def test_verdicts_list_cause_and_checks(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [invented_trial("ddp", 2)])
    assert verification_tables([load_run(folder)]) == []
    verdict = invented_verdict(
        strategy_options={"bucket_mb": 1},
        equivalent=False,
        checks=(
            Check(
                name="losses", holds=False, found=2.0, expected=1.0, tolerance=0.5, in_tolerances=2
            ),
        ),
        cause=Cause(text="summed", evidence="twice", setting="averaging", first_deviation="loss"),
    )
    write_verification(folder, Verification(reference="one", steps=3, verdicts=(verdict,)))
    ((_, verdicts, checks),) = verification_tables([load_run(folder)])
    assert verdicts.rows == (
        (
            "ddp (bucket_mb=1) on 2 ranks, fp32",
            "not equivalent",
            "2",
            "",
            "summed. Evidence: twice. Setting: averaging. First deviation: loss.",
        ),
    )
    assert [table.rows for table in checks] == [(("losses", "deviates", "2", "1", "0.5", ""),)]


def test_a_page_is_written_whole_or_not_at_all(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = run / "report.html"
    page.write_text("the old page")

    def full(self: Path, target: Path) -> None:  # noqa: ARG001
        raise OSError(28, "No space left on device", str(self))

    monkeypatch.setattr(Path, "replace", full)
    assert main(["report", str(run), "--no-images"]) == 2
    assert "No space left on device" in capsys.readouterr().err
    assert page.read_text() == "the old page"
    assert not list(run.glob(".report*"))
