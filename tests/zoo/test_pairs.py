"""The referee names what differs between two scripts, and calls equal ones the same."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from shardmark.audit.script import Against, audit_script
from shardmark.scripts.command import parse_command
from tests.zoo.forked import start_forked
from tests.zoo.pairs.cases import FOLDER, PAIRS, Pair

if TYPE_CHECKING:
    from shardmark.audit.audit import AuditReport

IN_EVERY_RUN = {"another way to shard", "decay of norms", "sampler's seed"}
LONGEST_SECONDS = 240.0


def compared(pair: Pair) -> AuditReport:
    a, b = (parse_command([str(FOLDER / script), *rest]) for script, *rest in (
        pair.a.split(), pair.b.split()
    ))  # fmt: skip
    return audit_script(
        b,
        ranks=pair.ranks[1],
        against=Against(command=a, ranks=pair.ranks[0]),
        longest_seconds=LONGEST_SECONDS,
        start=start_forked,
    )


@pytest.mark.parametrize(
    "pair",
    [
        pytest.param(
            pair, id=pair.name, marks=() if pair.name in IN_EVERY_RUN else (pytest.mark.zoo,)
        )
        for pair in PAIRS
    ],
)
def test_a_pair_is_told_apart(pair: Pair) -> None:
    report = compared(pair)
    assert report.same is (not pair.difference), report.answer
    if pair.difference:
        assert report.findings[0].name == pair.difference, report.answer
