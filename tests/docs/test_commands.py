"""Every command of ours in the pages is run: on a stored run, as a plan, or elsewhere."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path

import pytest

from shardmark.base.files.strict_yaml import parse_yaml
from shardmark.cli import main
from tests import ROOT
from tests.docs.pages import blocks, cases, commands, inline_commands, parse

STORED = ROOT / "tests" / "golden" / "v1"
"""A stored run of `single`, `ddp` and `fsdp`, which stands for every folder that a page names."""

PLANNED = {"run"}
"""Trains: run with `--dry-run`.  The same verb trains in tests/distributed, and CI runs the first
command of the README on a fresh machine."""

NOT_HERE = {
    "verify": "starts process groups: tests/distributed verifies every strategy; parsed here",
    "time": "runs a reader's scripts: tests/distributed times some; parsed here",
    "batch": "trains up to four trials a strategy: tests/distributed tries some; parsed here",
}
"""Verbs of ours that are only parsed and planned, by `test_docs.test_commands_parse`."""

WANTING = {
    **dict.fromkeys(
        ("mlflow", "tensorboard", "trackio", "wandb"),
        "leaves threads behind: tests/commands exports a stored run to each; parsed here",
    ),
    "--network": "starts process groups: tests/distributed measures between ranks; parsed here",
    "--regression": "several repeats of each cell: tests/unit/report_compare has them; parsed here",
    **dict.fromkeys(
        ("torchrun", "accelerate", "deepspeed"),
        "a verified trial as it was planned: tests/unit/export has some; parsed here",
    ),
}
"""Beginnings of arguments that ask for something that the tests do without."""


def ours() -> Iterator[tuple[str, list[str]]]:
    """Each different command once, with the place of the first.

    Another folder's name makes no other command: what is stored there is the same.
    """
    seen: set[tuple[str, ...]] = set()
    written = ((place, words[1:]) for place, words in commands() if words[0] == "shardmark")
    for place, words in (*written, *inline_commands()):
        here = words[0] not in NOT_HERE and not any(w.startswith(tuple(WANTING)) for w in words)
        if not here:
            continue
        runs = runs_of(words)
        command = tuple(f"run {runs.index(word)}" if word in runs else word for word in words)
        if command not in seen:
            seen.add(command)
            yield place, words


def runs_of(words: list[str]) -> Sequence[str]:
    """The folders of runs that the command reads."""
    return () if words[0].startswith("-") else tuple(map(str, parse(words).get("runs") or ()))


@cache
def files_of_readers() -> dict[str, str]:
    """Name -> text of each file that a page has its reader write."""
    named = {
        f"{name}.yaml": text
        for _, text in blocks("yaml")
        if isinstance(name := parse_yaml(text, "block").get("name"), str)
    }
    titled = {
        text.partition("\n")[0].removeprefix("# "): text
        for language in ("python", "yaml")
        for _, text in blocks(language)
    }
    written = {name: text for name, text in titled.items() if name.endswith((".py", ".yaml"))}
    return named | written


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, as the pages' reader has it."""
    script = files("shardmark.experiment") / "templates" / "script.py"
    for name, text in {"train.py": script.read_text(), **files_of_readers()}.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def store(folder: Path) -> None:
    shutil.copytree(STORED, folder, dirs_exist_ok=True)


@pytest.mark.parametrize("words", cases(ours()))
def test_command_runs(words: list[str], place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for run in runs_of(words) or ("runs/quickstart",):
        store(place / run)
    if not runs_of(words):
        (place / "runs" / "latest").symlink_to("quickstart")
    if words[0] in PLANNED:
        words = [*words, *([] if "--dry-run" in words else ["--dry-run"])]
    if words[0] == "init":
        words = [*words, "--out", "new"]
    if words[0] == "why":
        words = [words[0], "--budget", "180s" if "--ranks" in words else "90s", *words[1:]]
    code = main(words)
    printed = capsys.readouterr()
    absent = ("no such folder", "no file 'train.py'")
    if words[0] in PLANNED and any(text in printed.err for text in absent):
        assert code == 2, "the reader's own data and script are not here"
        return
    phases = re.compile(r"\[ *\d+ s\] ")
    lines = [line for line in printed.err.splitlines() if not phases.match(line)]
    said = [line for line in lines if " replaces " not in line]
    nothing_fits = words[0] == "plan" and printed.out.startswith("Nothing fits")
    assert (code, said) == (int(nothing_fits), [])
    assert printed.out.strip()


def checks_of_python() -> Iterator[tuple[str, list[str]]]:
    return ((place, words) for place, words in commands() if words[:2] == ["python", "-c"])


@pytest.mark.parametrize("words", cases(checks_of_python()))
def test_line_of_python_runs(words: list[str], tmp_path: Path) -> None:
    command = [sys.executable, *words[1:]]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, check=True)
    assert ended.stdout.strip()


def loading() -> Iterator[tuple[str, str]]:
    """Code that only loads runs; `shardmark.run` trains, which tests/distributed does."""
    for place, code in blocks("python"):
        if "shardmark.load(" in code and "shardmark.run(" not in code:
            yield place, code


@pytest.mark.parametrize("code", cases(loading()))
def test_python_that_loads_runs_works(code: str, place: Path) -> None:
    for folder in re.findall(r'shardmark\.load\("([^"]+)"\)', code):
        store(place / folder)
    exec(compile(code, "block", "exec"), {"__name__": "block"})
