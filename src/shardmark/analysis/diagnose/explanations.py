"""Explains surprises from what was recorded, with amounts; says so where nothing explains them."""

from __future__ import annotations

from shardmark.analysis.advise.candidates import fields_of
from shardmark.analysis.compare.comparison import Comparison
from shardmark.analysis.diagnose.explanations_memory import memory_explanations
from shardmark.analysis.diagnose.explanations_quality import quality_explanations
from shardmark.analysis.diagnose.explanations_time import time_explanations
from shardmark.analysis.diagnose.explanations_waits import wait_explanations
from shardmark.analysis.diagnose.surprise import Explanation


def explain(comparison: Comparison) -> tuple[Explanation, ...]:
    """Every surprise among rows that train the same thing, group by group.

    A surprise is a difference that is large enough to matter and that the repeats show; with one
    repeat it is explained, and marked as not shown.
    """
    found: list[Explanation] = []
    for field in fields_of(comparison.rows):
        found += time_explanations(field)
        found += memory_explanations(field)
        found += quality_explanations(field)
        found += wait_explanations(field)
    return tuple(found)
