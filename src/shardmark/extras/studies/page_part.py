"""The part of the report page about a published study."""

from __future__ import annotations

from collections.abc import Callable

from shardmark.bench.analysis.compare.comparison import Comparison
from shardmark.bench.report.page.page import PagePart
from shardmark.extras.studies.against import set_against
from shardmark.extras.studies.against_view import against_tables
from shardmark.extras.studies.published_figure import published_figures
from shardmark.extras.studies.study import load_study


def study_part(name: str, option: str) -> Callable[[Comparison], PagePart]:
    """Return a function that compares with the study.  Raises `InputError` for an unknown name."""
    study = load_study(name, option)

    def part(comparison: Comparison) -> PagePart:
        against = set_against(comparison, study)
        return PagePart(
            title=f"Against {study.cited}",
            figures=published_figures(against),
            tables=against_tables(against),
        )

    return part
