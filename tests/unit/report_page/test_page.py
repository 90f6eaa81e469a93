"""The page as text: what is on it, what is escaped, what it refuses."""

from __future__ import annotations

import base64
import hashlib
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest

from shardmark.analysis.compare.comparison import compare
from shardmark.cli import main
from shardmark.report.page.page import render_page, sentence, template_text
from shardmark.results.schema import Failure, Outcome
from shardmark.results.store import load_run
from tests.golden.invented import invented_trial, write_run

GOLDEN = Path(__file__).parents[2] / "golden" / "v1"
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
def run(tmp_path: Path) -> Path:
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


def test_sentences_are_set_like_print() -> None:
    text = sentence("`ddp` on 2 ranks: 5 % of 3 s, <b> `&`; 4 seconds")
    assert text == (
        "<code>ddp</code> on 2\N{NO-BREAK SPACE}ranks: 5\N{NO-BREAK SPACE}% of"
        " 3\N{NO-BREAK SPACE}s, &lt;b&gt; <code>&amp;</code>; 4 seconds"
    )


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


def test_only_failed_trials_make_a_page(tmp_path: Path) -> None:
    trials = [invented_trial("ddp", 2, outcome=Outcome.TIMED_OUT)]
    text = page_of(write_run(tmp_path / "run", trials)).text
    assert "timed_out" in text
    assert "no reason was recorded" in text


def test_what_is_missing_or_damaged_is_told(run: Path) -> None:
    (run / "trials" / "ddp-2-7").mkdir()
    (run / "trials" / "ddp-2-0" / "result.json").write_text("{")
    (run / "environment.json").write_text("[]")
    (run / "experiment.yaml").unlink()
    text = page_of(run).text
    for fact in (
        "begun without a result: ddp-2-7",
        "ddp-2-0: is not whole JSON",
        f"All {len(load_run(run).trials)} trials",
        "No environment was stored",
        "experiment.yaml cannot be read",
    ):
        assert fact in text


def test_several_runs_are_told_apart(run: Path, tmp_path: Path) -> None:
    other = write_run(tmp_path / "other", [invented_trial("single", 1)])
    runs = [load_run(run), load_run(other)]
    text = Parsed(render_page(runs, compare(runs), (), None)).text
    assert f"invented ({other})" in text
    assert f"All {len(runs[0].trials) + 1} trials" in text


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
def test_mistakes_are_told(
    run: Path, arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "folder.html").mkdir()
    (run / "trials" / "trials").mkdir()
    assert main(["report", *(argument.format(run=run) for argument in arguments)]) == 2
    assert told in capsys.readouterr().err


def test_a_run_without_any_result_is_told(
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
