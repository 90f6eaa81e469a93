"""`why` names what makes the commands of the zoo slow."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.why import document_of, verdicts

from tests.zoo.slow.cases import QUIET, SLOW, Slow

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(
    not (ROOT / "src/shardmark/cli/why.py").exists(), reason="the command does not exist yet"
)
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=() if case.name == "items" else pytest.mark.zoo)
        for case in (*SLOW, *QUIET)
    ],
)
def test_the_cause_of_a_slow_command_is_named(case: Slow, tmp_path: Path) -> None:
    words = ["why", "--budget", "4m", "--", *case.launched()]
    document = document_of(words, case.link, str(tmp_path))
    right = verdicts(case, case.amount_ms or 1.0, document)
    assert right["cause"], document["answer"]
    assert right.get("rank", True), document["answer"]
