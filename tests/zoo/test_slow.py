"""`why` names what makes the commands of the zoo slow."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.why import document_of, verdicts

from tests.zoo.slow.cases import QUIET, SLOW, Slow


@pytest.mark.slow
def test_a_slow_input_is_among_what_was_taken_away(tmp_path: Path) -> None:
    """Loading beside another test takes half a minute of the budget."""
    words = ["why", "--budget", "2m", "--", *SLOW[0].launched()]
    document = document_of(words, None, str(tmp_path))
    assert "input" in {part["kind"] for part in (*document["parts"], *document["undecided"])}


@pytest.mark.zoo
@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in (*SLOW, *QUIET)])
def test_the_cause_of_a_slow_command_is_named(case: Slow, tmp_path: Path) -> None:
    words = ["why", "--budget", "4m", "--", *case.launched()]
    document = document_of(words, case.link, str(tmp_path))
    right = verdicts(case, case.amount_ms or 1.0, document)
    assert right["cause"], document["answer"]
    assert right.get("rank", True), document["answer"]
