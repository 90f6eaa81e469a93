"""Stores the comparison and the verdicts of a run, and on request the run.

    python benchmarks/results_table.py RUN NAME [--archive] [--epochs]
    python benchmarks/results_table.py RUN NAME --against STUDY --command 'shardmark run ...'

Writes `DATE-NAME.md`, `DATE-NAME.json` (every metric of every row) and, if the run was verified,
`DATE-NAME-verification.json` to benchmarks/results/.  `--archive` adds `DATE-NAME.tar.xz`, from
which `docs/images/draw.py` draws pictures.  `--epochs` adds losses and qualities by epoch.
`--against` writes one page instead: the run beside a study, its bytes, effort and verdicts.
"""

from __future__ import annotations

import argparse
import io
import json
import shlex
import sys
import tarfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import RESULTS, surroundings_in, surroundings_line

from shardmark.base.files.run_files import LOG_FILE
from shardmark.base.results.store import ENVIRONMENT_FILE, RunFolder, load_run
from shardmark.base.results.verification import Verification
from shardmark.base.table.formats import Format, render_tables
from shardmark.base.table.table import metric
from shardmark.bench.analysis.compare.comparison import Comparison, compare
from shardmark.bench.analysis.compare.epochs import epochs_of
from shardmark.bench.analysis.compare.rows import STATE_METRICS
from shardmark.bench.report.answers.overview import overview_json
from shardmark.bench.report.table.comparison import comparison_table
from shardmark.bench.report.table.row_columns import table_by_row
from shardmark.bench.report.views.effort import effort_tables
from shardmark.extras.studies.against import set_against
from shardmark.extras.studies.against_view import against_tables
from shardmark.extras.studies.study import load_study

BYTES = [
    metric(name, unit="MB", scale=1e-6, decimals=2, title=name.removesuffix("_bytes"))
    for name in (*STATE_METRICS, "peak_memory_bytes", "collective_bytes")
]
NOT_STORED = {"host": "machine", "python_executable": "python"}
"""Facts of the environment that belong to one machine alone, and what is stored in their place."""


def verdict_lines(verification: Verification | None) -> list[str]:
    """A table with the largest deviation of each verdict in units of its tolerance."""
    if verification is None:
        return ["Not verified."]
    lines = [
        "| model | strategy | ranks | equivalent | largest deviation / tolerance |",
        "|---" * 5 + "|",
    ]
    for verdict in sorted(verification.verdicts, key=lambda v: (str(v.varied), v.strategy)):
        model = str(verdict.varied.get("workload.model", ""))
        word = {True: "yes", False: "no", None: "not tried"}[verdict.equivalent]
        worst = "" if verdict.worst is None else f"{verdict.worst:.2g}"
        cells = (model, verdict.strategy, str(verdict.world_size), word, worst)
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def curves(comparison: Comparison) -> list[dict[str, object]]:
    """Losses and qualities of each row by epoch: mean over the repeats, and its interval."""
    return [
        {
            "strategy": row.strategy,
            "world_size": row.world_size,
            "epoch": epoch.number,
            **{
                name: [estimate.value, estimate.low, estimate.high]
                for name, estimate in epoch.metrics.items()
                if estimate is not None and not name.endswith("_seconds")
            },
        }
        for row in comparison.rows
        for epoch in epochs_of(row).epochs
    ]


def study_page(
    name: str, comparison: Comparison, verification: Verification | None, place: str, command: str
) -> str:
    """The run beside the study, below the command that made the run."""
    rows = [(row, row) for row in comparison.rows]
    tables = [
        *against_tables(set_against(comparison, load_study(name))),
        table_by_row("Bytes of the fullest rank, and bytes of collectives in a step", rows, BYTES),
        *effort_tables(comparison),
    ]
    return "\n".join(
        (
            f"# {name}: a small run against the study\n",
            f"```bash\n{command.strip()}\nshardmark report RUN --against {name}\n```\n",
            f"{place}\n",
            render_tables(tables, Format.MARKDOWN),
            "### Verification\n",
            *verdict_lines(verification),
            "",
        )
    )


def archive(run: Path, file: Path) -> None:
    """Store the files of a run without names of this machine; sizes are recorded, so they stay."""
    places = sorted({sys.prefix, str(Path.home()), str(run.resolve().parent)}, key=len)
    with tarfile.open(file, "w:xz") as stored:
        for path in sorted(run.rglob("*")):
            if path.suffix not in (".json", ".jsonl", ".yaml") and path.name != LOG_FILE:
                continue
            text = path.read_text(encoding="utf-8")
            if path == run / ENVIRONMENT_FILE:
                text = json.dumps(json.loads(text) | NOT_STORED, indent=1)
            for place in reversed(places):
                text = text.replace(place, "x" * len(place.encode()))
            member = tarfile.TarInfo(str(Path(run.name) / path.relative_to(run)))
            member.size = len(content := text.encode())
            stored.addfile(member, io.BytesIO(content))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("name")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the files")
    parser.add_argument("--archive", action="store_true", help="also store the run")
    parser.add_argument("--epochs", action="store_true", help="also store values by epoch")
    parser.add_argument("--against", metavar="STUDY", help="write a page beside this study")
    parser.add_argument("--command", default="", help="the command that made the run")
    options = parser.parse_args()
    run = load_run(options.run)
    environment = RunFolder(options.run).read_environment()
    comparison = compare([run], None)
    table = render_tables([comparison_table(comparison)], Format.MARKDOWN, headings=False).strip()
    place = surroundings_line(surroundings_in(environment))
    stem = f"{environment['date'][:10]}-{options.name}"
    options.out.mkdir(parents=True, exist_ok=True)
    if options.against:
        verified, page = run.verification, options.out / f"{stem}.md"
        page.write_text(study_page(options.against, comparison, verified, place, options.command))
        return
    verdicts = "\n".join(verdict_lines(run.verification))
    (options.out / f"{stem}.md").write_text(
        f"# {options.name}\n\n{place}\n\n{table}\n\n## Verification\n\n{verdicts}\n"
    )
    command = shlex.join(["python", "benchmarks/results_table.py", *sys.argv[1:]])
    content = {"place": place, "command": command, **json.loads(overview_json(comparison))}
    if options.epochs:
        content["epochs"] = curves(comparison)
    text = json.dumps(content, indent=1, default=str)
    (options.out / f"{stem}.json").write_text(text + "\n")
    if run.verification is not None:
        verification = run.verification.model_dump_json(indent=1)
        (options.out / f"{stem}-verification.json").write_text(verification + "\n")
    if options.archive:
        archive(options.run, options.out / f"{stem}.tar.xz")


if __name__ == "__main__":
    main()
