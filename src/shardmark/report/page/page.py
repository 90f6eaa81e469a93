"""The report page: one HTML file with everything in it, and the figures as files beside it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from shardmark.analysis.compare.comparison import Comparison
from shardmark.analysis.diagnose.stability import warnings_of
from shardmark.core.errors import InputError
from shardmark.core.version import __version__
from shardmark.report.answers.answers import answer_lines
from shardmark.report.figures import figures_of
from shardmark.report.figures.figure import Figure
from shardmark.report.figures.plotly_drawing import plotly_figure
from shardmark.report.page.assets import fill, json_block
from shardmark.report.page.equivalence import status_of, verified
from shardmark.report.page.facts import facts_of, progress_notes
from shardmark.report.page.method import definitions, method
from shardmark.report.page.network import network_parts
from shardmark.report.page.outcomes import not_ok
from shardmark.report.page.stability import by_kind, doubt
from shardmark.report.page.tables import page_table
from shardmark.report.page.trials import ranks_table, trials_table
from shardmark.report.table.comparison import WIDE, comparison_json, comparison_table
from shardmark.report.table.formats import render_csv, render_json
from shardmark.report.table.notes import NoteKind, notes_of
from shardmark.report.table.sections import text_columns
from shardmark.results.files import write_whole
from shardmark.results.store import StoredRun

if TYPE_CHECKING:
    from markupsafe import Markup

PAGE_NAME = "report.html"
SUFFIXES = (".html", ".htm")
LONGEST_HEAD = 80
_BRACKETS = re.compile(r"\([^()]*\)")
_HEAD = re.compile(r"([^:,]+(?::(?= )|(?=, [^:]*: )))")

WARNINGS = (
    NoteKind.LOST,
    NoteKind.RESTARTED,
    NoteKind.NOT_EQUIVALENT,
    NoteKind.UNSTABLE,
    NoteKind.DAMAGED,
)
"""Notes that cast doubt on a number."""

TOLD_ELSEWHERE = (NoteKind.FAILURE,)
"""Notes that the section on what did not end ok says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What was put on the disk."""

    page: Path
    images: Path | None
    """Folder of the figures; None where none were asked for, or there is none to draw."""
    figures: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PageFigure:
    """One figure as the template shows it."""

    number: int
    figure: Figure
    panels: Markup
    """A list of plotly's figures, one for each panel: a narrow page puts them below one another."""
    image: str
    """Address of the image files without their suffix, from the page; empty without images."""


def write_report(
    runs: Sequence[StoredRun], comparison: Comparison, out: Path, *, images: bool = True
) -> Written:
    """Write the page to `out` whole or not at all, and the figures into NAME-figures beside it.

    Raises `InputError` where no trial has a result, or where `out` cannot be written.
    """
    _check(runs, comparison, out)
    figures = figures_of(comparison)
    folder = out.with_name(f"{out.stem}-figures") if images and figures else None
    page = render_page(runs, comparison, figures, None if folder is None else folder.name)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        if folder is not None:
            from shardmark.report.figures.images import write_images  # loads matplotlib

            write_images(figures, folder)
        write_whole(out, page.encode("utf-8", errors="replace"))
    except OSError as error:
        where = str(error.filename or out)
        found = f"cannot be written: {error.strerror or error}"
        raise InputError(where, found, "name a file in a folder of yours with --out") from None
    return Written(page=out, images=folder, figures=len(figures))


def render_page(
    runs: Sequence[StoredRun],
    comparison: Comparison,
    figures: Sequence[Figure],
    images: str | None,
) -> str:
    """The whole page; `images` is the folder of the figures' files, as seen from the page."""
    return fill(
        {
            "version": __version__,
            "title": ", ".join(dict.fromkeys(run.name for run in runs)),
            "facts": [facts_of(run) for run in runs],
            "progress": progress_notes(runs),
            "images": images,
            "figures": _page_figures(figures, images),
            "verified": verified(runs),
            "method": method(runs),
            "trial_count": sum(len(run.trials) for run in runs),
            "csv": json_block(render_csv([comparison_table(comparison)])),
            "json": json_block(render_json(comparison_json(comparison))),
            **_of_comparison(comparison),
        }
    )


def _of_comparison(comparison: Comparison) -> dict[str, object]:
    """The template's values that come from the comparison alone."""
    rows = comparison.rows
    unstable = warnings_of(comparison)
    notes = [note for note in notes_of(comparison, unstable) if note.kind not in TOLD_ELSEWHERE]
    return {
        "workloads": list(dict.fromkeys(row.workload for row in rows)),
        "status": status_of(rows),
        "doubt": doubt(rows, unstable),
        "recommendation": [headed(line) for line in answer_lines(comparison)],
        "table": page_table(
            "comparison", "Every measured cell.", text_columns(comparison_table(comparison, WIDE))
        ),
        "warnings": [note.text for note in notes if note.kind in WARNINGS],
        "unstable": by_kind(unstable),
        "notes": [note.text for note in notes if note.kind not in WARNINGS],
        "not_ok": not_ok(rows),
        "damaged": [f"{one.path.parent.name}: {one.reason}" for one in comparison.damaged],
        "definitions": definitions(rows),
        "network": network_parts(comparison),
        "trials": trials_table(rows),
        "ranks": ranks_table(rows),
    }


def headed(line: str) -> tuple[str, str]:
    """What the line is about, such as `Fastest:`, and the rest; nothing where that is too long.

    What stands in brackets divides nothing.
    """
    covered = _BRACKETS.sub(lambda found: "x" * len(found[0]), line)
    parts = _HEAD.match(covered)
    end = 0 if parts is None else parts.end(1)
    return (line[:end], line[end:]) if end <= LONGEST_HEAD else ("", line)


def default_out(folders: Sequence[Path]) -> Path:
    """Inside the run's folder.  Raises `InputError` for several runs: none is the right one."""
    if len(folders) != 1:
        raise InputError(
            "--out", f"{len(folders)} runs and no file", "name the page to write, such as both.html"
        )
    return folders[0] / PAGE_NAME


def _check(runs: Sequence[StoredRun], comparison: Comparison, out: Path) -> None:
    if out.suffix.lower() not in SUFFIXES:
        raise InputError("--out", f"{str(out)!r} is no HTML file", "its name ends in .html")
    if out.is_dir():
        raise InputError("--out", f"{str(out)!r} is a folder", "name a file in it")
    if comparison.rows:
        return
    where = ", ".join(str(run.path) for run in runs)
    if comparison.damaged:
        first = comparison.damaged[0]
        found = f"no trial can be believed; {len(comparison.damaged)} damaged, the first is {first}"
        raise InputError(where, found, "run it again: only what is missing is run")
    raise InputError(where, "no trial has a result yet", "report it when the first trial has ended")


def _page_figures(figures: Sequence[Figure], images: str | None) -> list[PageFigure]:
    return [
        PageFigure(
            number=number,
            figure=figure,
            panels=json_block(
                [plotly_figure(replace(figure, panels=(panel,))) for panel in figure.panels]
            ),
            image="" if images is None else quote(f"{images}/{figure.name}"),
        )
        for number, figure in enumerate(figures, start=1)
    ]
