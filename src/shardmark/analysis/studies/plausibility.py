"""Where arithmetic contradicts a published figure: computed from the study's own numbers.

Each check states its assumption, its formula and the margin beyond which it speaks; what it takes
beside the study's numbers are sizes of models and data sets, and published quality of weights.
"""

from __future__ import annotations

from shardmark.analysis.studies.against import Against
from shardmark.analysis.studies.plausibility_check import Check, Examined, Finding
from shardmark.analysis.studies.plausibility_memory import memory_checks
from shardmark.analysis.studies.plausibility_quality import quality_checks
from shardmark.analysis.studies.plausibility_ratio import ratio_checks
from shardmark.analysis.studies.plausibility_time import time_checks
from shardmark.analysis.studies.plausibility_words import word_checks

__all__ = ["Check", "Examined", "Finding", "plausibility_of"]


def plausibility_of(against: Against) -> tuple[Examined, ...]:
    """Every check over the study, also those that find nothing or have no figure to check."""
    kinds = (memory_checks, ratio_checks, time_checks, quality_checks, word_checks)
    return tuple(one for checks in kinds for one in checks(against))
