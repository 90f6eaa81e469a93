"""The report page: one HTML file with everything in it, and the figures as files beside it."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from urllib.parse import quote

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup, escape

from shardmark.base.errors import InputError
from shardmark.base.results.files import write_files
from shardmark.base.results.store import StoredRun
from shardmark.base.system.plugins import by_name
from shardmark.base.table.formats import Format, render_csv, render_tables
from shardmark.base.table.table import Table
from shardmark.base.text import one_line, printable
from shardmark.base.version import __version__
from shardmark.bench.analysis.compare.comparison import Comparison
from shardmark.bench.analysis.compare.rows import Row, trained
from shardmark.bench.analysis.diagnose.stability import warnings_of
from shardmark.bench.report.answers.answers import LABELS, answer_grid, answers
from shardmark.bench.report.answers.overview import overview_json
from shardmark.bench.report.answers.parts import parts_table
from shardmark.bench.report.answers.surprises import why_lines
from shardmark.bench.report.figures import Figure, figures_of
from shardmark.bench.report.figures.drawing import Drawing, draw, plain_text, swatch, write_images
from shardmark.bench.report.page.anonymous import anonymous as without_names
from shardmark.bench.report.page.parts import (
    definitions,
    facts_of,
    failed_trials,
    progress_notes,
    ranks_table,
    trials_table,
    verification_tables,
)
from shardmark.bench.report.table.comparison import WIDE, comparison_table
from shardmark.bench.report.table.notes import NoteKind, notes_of
from shardmark.bench.report.table.row_columns import row_columns
from shardmark.bench.report.views.effort import effort_tables
from shardmark.bench.report.views.epochs import epochs_tables
from shardmark.bench.report.views.metrics import metrics_tables
from shardmark.bench.report.views.network import network_tables

PAGE_NAME = "report.html"
SUFFIXES = (".html", ".htm")
FIRST = ("speed-and-memory", "throughput")
"""Figures that are open at first."""
LEAST_FILTERED = 6
"""Number of rows from which the page has filters."""
CAUTIONS = (NoteKind.NOT_EQUIVALENT,)
"""Notes that cast doubt on a number."""
SHOWN_ELSEWHERE = (NoteKind.FAILURE, NoteKind.UNSTABLE, NoteKind.DAMAGED)
"""Notes that have a section of their own."""
_CODE = re.compile(r"`([^`\n]+)`")
_UNIT = re.compile(
    r"(\d) (?=(?:%|[KMG]iB|ms|s|(?:samples|tokens)/s|ranks?|steps?|trials?)(?![\w/]))"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PagePart:
    """A part of the page that is made outside of `report`."""

    title: str
    figures: Sequence[Figure]
    tables: Sequence[Table]


study_part = by_name("shardmark.extras.studies.published_figure:study_part")
"""Finds the study of a name, and returns a function from a comparison to its `PagePart`."""


def write_report(
    runs: Sequence[StoredRun],
    comparison: Comparison,
    out: Path,
    *,
    images: bool = True,
    predicted: bool = False,
    against: PagePart | None = None,
    anonymous: bool = False,
    latex: bool = False,
) -> list[str]:
    """Write the page to `out` atomically, and the figures into NAME-figures beside it.

    `predicted` also draws predictions; `against` is the part of a study; `latex` also writes the
    tables of rows, epochs and the study into NAME.tex; `anonymous` leaves out the names of machines
    and users, and absolute paths.  Returns lines that name the files.  Raises `InputError` if no
    trial has a result, and `StorageError` if a file cannot be written.
    """
    _check(runs, comparison, out)
    figures = figures_of(comparison, predicted=predicted)
    drawings = draw([*figures, *(against.figures if against else ())])
    folder = out.with_name(f"{out.stem}-figures") if images and drawings else None
    page = render_page(runs, comparison, drawings, None if folder is None else folder.name, against)
    texts, written = {out: page}, [f"report: {out}"]
    if latex:
        tables = [comparison_table(comparison), *epochs_tables(comparison)]
        tables += against.tables if against else ()
        texts[out.with_suffix(".tex")] = render_tables(tables, Format.LATEX)
        written.append(f"tables: {out.with_suffix('.tex')}")
    if anonymous:
        texts = {path: without_names(text, runs) for path, text in texts.items()}
    if folder is not None:
        write_images(drawings, folder)
        written.append(f"figures: {folder} ({len(drawings)}, each as PNG and SVG)")
    write_files({path: text.encode("utf-8", errors="replace") for path, text in texts.items()})
    return written


def render_page(
    runs: Sequence[StoredRun],
    comparison: Comparison,
    drawings: Sequence[Drawing],
    images: str | None,
    against: PagePart | None = None,
) -> str:
    """Return the page; `images` is the folder of the figures' files, relative to the page."""
    rows = comparison.rows
    figures = [_figure(drawing, images) for drawing in drawings]
    of_study = {figure.name for figure in against.figures} if against else set()
    unstable = warnings_of(comparison)
    notes = [note for note in notes_of(comparison, unstable) if note.kind not in SHOWN_ELSEWHERE]
    given_answers = answers(comparison)
    several = any(len(trial.ranks) > 1 for row in rows for trial in row.ok_trials)
    style, script = template_text("report.css"), template_text("report.js")
    return (
        _templates()
        .get_template("report.html.j2")
        .render(
            version=__version__,
            policy=policy(script, style),
            style=Markup(style),
            script=Markup(script),
            title=", ".join(dict.fromkeys(run.name for run in runs)),
            workloads=list(dict.fromkeys(row.workload for row in rows)),
            trial_count=sum(len(run.trials) for run in runs),
            facts=[facts_of(run) for run in runs],
            cards=[
                (LABELS[answer.question], answer)
                for answer in given_answers
                if answer.question in LABELS
            ],
            cautions=[
                *(answer.text for answer in given_answers if answer.question == "caution"),
                *progress_notes(runs),
                *(note.text for note in notes if note.kind in CAUTIONS),
            ],
            notes=[note.text for note in notes if note.kind not in CAUTIONS],
            why=why_lines(comparison),
            grid=answer_grid(comparison),
            parts=parts_table(comparison),
            unstable=unstable,
            figures={n: figure for n, figure in figures if n not in (*FIRST, *of_study)},
            study=against,
            study_figures=[figure for name, figure in figures if name in of_study],
            first={name: figure for name, figure in figures if name in FIRST},
            table=comparison_table(comparison, WIDE),
            **_axes(rows),
            csv=render_csv([comparison_table(comparison)]),
            json=overview_json(comparison),
            network=network_tables(comparison) if several else [],
            verification=verification_tables(runs),
            failed_trials=failed_trials(rows),
            failed=sum(len(row.trials) - len(trained(row.trials)) for row in rows),
            damaged=[f"{file.path.parent.name}: {file.reason}" for file in comparison.damaged],
            all_metrics=metrics_tables(comparison)[0],
            effort=effort_tables(comparison)[0],
            definitions=definitions(rows),
            tables={"trials": trials_table(rows), "ranks": ranks_table(rows)},
        )
    )


def template_text(name: str) -> str:
    return (
        files("shardmark.bench.report.page").joinpath("templates", name).read_text(encoding="utf-8")
    )


def _templates() -> Environment:
    """Return an environment that escapes all values but `Markup` and drops control characters."""
    environment = Environment(
        loader=FunctionLoader(template_text),
        autoescape=True,
        finalize=lambda value: (
            printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value
        ),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["sentence"] = sentence
    return environment


def sentence(text: str) -> Markup:
    """Escape a text, format names in backquotes as code, and join each number to its unit."""
    escaped = str(escape(one_line(text)))
    return Markup(_UNIT.sub("\\1\N{NO-BREAK SPACE}", _CODE.sub("<code>\\1</code>", escaped)))


def policy(script: str, style: str) -> str:
    """Return a content security policy that allows this inline script and style alone."""

    def sha256(text: str) -> str:
        return base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode()

    return (
        f"default-src 'none'; script-src 'sha256-{sha256(script)}';"
        f" style-src 'sha256-{sha256(style)}'; base-uri 'none'; form-action 'none'"
    )


def default_out(folders: Sequence[Path]) -> Path:
    """Return the page inside the run's folder.  Raises `InputError` for several runs."""
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
    folders = ", ".join(str(run.path) for run in runs)
    if comparison.damaged:
        first = comparison.damaged[0]
        reason = f"no trial can be believed; {len(comparison.damaged)} damaged, the first: {first}"
        raise InputError(folders, reason, "run it again: only what is missing is run")
    raise InputError(
        folders, "no trial has a result yet", "report it when the first trial has ended"
    )


def _figure(drawing: Drawing, images: str | None) -> tuple[str, dict[str, object]]:
    figure = drawing.figure
    return figure.name, {
        "name": figure.name,
        "title": figure.title,
        "caption": " ".join(filter(None, (figure.warning, figure.caption))),
        "image": "" if images is None else quote(f"{images}/{figure.name}"),
        "panels": [
            {"title": panel.title, "label": f"{panel.y_label} {panel.x_label}", "svg": Markup(svg)}
            for panel, svg in zip(figure.panels, drawing.panels, strict=True)
        ],
        "legend": {
            plain_text(name): Markup(swatch(series, figure))
            for name, series in figure.legend.items()
        },
    }


def _axes(rows: Sequence[Row]) -> dict[str, object]:
    """Return the page's filters, for many rows only, and every row's value on each axis."""
    named = [(column, value_of) for column, value_of in row_columns(rows) if column.names_row]
    by_row = [
        {column.title: column.show(value_of(row)) for column, value_of in named} for row in rows
    ]
    axes = {column.title: dict.fromkeys(row[column.title] for row in by_row) for column, _ in named}
    filters = {title: list(choices) for title, choices in axes.items() if len(choices) > 1}
    return {"filters": filters if len(rows) > LEAST_FILTERED else {}, "row_axes": by_row}
