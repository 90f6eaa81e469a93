"""What studies say in words: what their tables contradict, and what they bear out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from pydantic import ValidationError

from shardmark.analysis.studies import load_paper
from shardmark.analysis.studies.against import Against
from shardmark.analysis.studies.statements import Statement
from shardmark.report.studies.against_plausibility import plausibility_section
from tests.unit.papers.studies import check, figure, finding, study

ORDER = "order that the words claim"
LINEAR = "linearity that the words claim"


def orders(order: str, seconds: Mapping[str, float]) -> Against:
    figures = [figure(name, 2, metrics={"epoch_seconds": value}) for name, value in seconds.items()]
    statement = {"about": "epoch_seconds", "strategy": "ddp", "text": order, "order": order}
    return study(figures, [statement], rounding={"epoch_seconds": 1})


@pytest.mark.parametrize(
    ("order", "ddp", "contradicts"),
    [
        ("lowest", 9.0, False),
        ("lowest", 10.5, False),
        ("lowest", 12.0, True),
        ("second lowest", 15.0, False),
        ("second lowest", 8.0, True),
        ("second lowest", 25.0, True),
        ("highest", 25.0, False),
        ("highest", 15.0, True),
    ],
)
def test_orders_are_those_of_the_table(order: str, ddp: float, contradicts: bool) -> None:
    """The others take 10 and 20 seconds; a second of difference may be rounding."""
    against = orders(order, {"ddp": ddp, "fsdp": 10.0, "zero-1": 20.0})
    found = finding(against, "order that the words claim")
    assert (found is not None) is contradicts
    if found is not None:
        assert found.check.contradicted(found.published, found.limit, found.side)


def leads(first: Sequence[float], second: Sequence[float]) -> Against:
    def table(values: Sequence[float]) -> dict[str, object]:
        rows = [[number, value] for number, value in enumerate(values, start=1)]
        return {"columns": ["epoch", "map"], "rows": rows}

    figures = [figure("ddp", 2, epochs=table(first)), figure("fsdp", 2, epochs=table(second))]
    statement = {"about": "map", "strategy": "ddp", "text": "best", "order": "highest"}
    return study(figures, [statement])


def test_a_lead_within_the_scatter_shows_no_order() -> None:
    scattered = leads([0.1, 0.30, 0.34, 0.33], [0.1, 0.31, 0.30, 0.32])
    found = finding(scattered, "lead within the scatter")
    assert found is not None
    assert [found.published, found.limit] == pytest.approx([0.01, 0.04])
    clear = leads([0.1, 0.50, 0.51, 0.50], [0.3, 0.30, 0.31, 0.30])
    assert finding(clear, "lead within the scatter") is None
    short = leads([0.3, 0.4], [0.3, 0.39])
    assert check(short, "lead within the scatter").figure_count == 0


def test_two_claims_that_one_pair_contradicts_are_one_finding() -> None:
    """The study has the two the other way round: one fact, said of both."""
    seconds = {"ddp": 12.0, "fsdp": 10.0, "zero-1": 20.0}
    figures = [figure(name, 2, metrics={"epoch_seconds": value}) for name, value in seconds.items()]
    words = {"ddp": ("a top performer", "lowest"), "fsdp": ("next best", "second lowest")}
    statements = [
        {"about": "epoch_seconds", "strategy": name, "text": text, "order": order}
        for name, (text, order) in words.items()
    ]
    against = study(figures, statements)
    found = finding(against, ORDER)
    assert check(against, ORDER).figure_count == 2
    assert found is not None
    assert (found.published, found.limit) == (12.0, 10.0)
    (note,) = (
        one for one in plausibility_section(against).table.notes if one.startswith(found.subject)
    )
    assert "(stated, in short: a top performer; fsdp on 2 ranks, read as second lowest:" in note
    assert "next best)" in note


def test_the_fourth_study_has_two_such_facts() -> None:
    against = Against(paper=load_paper("asu-fsdp-2024"), pairs=())
    found = check(against, ORDER).findings
    assert [(one.published, one.limit) for one in found] == [(1005.49, 906.825), (1135.67, 1023.64)]
    text = " ".join(plausibility_section(against).table.notes)
    assert "called" not in text
    expected = plausibility_section(against).table.columns[3].cells
    assert expected[-2:] == ("at most 906.825 s", "at most 1023.64 s")
    assert "the top performer" in text


def test_a_value_of_zero_is_a_value() -> None:
    against = orders("lowest", {"ddp": 5.0, "fsdp": 0.0})
    found = finding(against, ORDER)
    assert found is not None
    assert (found.published, found.limit) == (5.0, 0.0)


@pytest.mark.parametrize(("seconds", "contradicts"), [(50.0, False), (55.0, False), (60.0, True)])
def test_linear_is_nine_tenths_of_the_devices(seconds: float, contradicts: bool) -> None:
    figures = [
        figure("ddp", 2, metrics={"epoch_seconds": 100.0}),
        figure("ddp", 4, metrics={"epoch_seconds": seconds}),
        figure("fsdp", 2, metrics={"epoch_seconds": 100.0}),
        figure("fsdp", 4, metrics={"epoch_seconds": 99.0}),
    ]
    statement = {
        "about": "scaling_efficiency",
        "strategy": "ddp",
        "text": "falls practically linearly",
        "linear": True,
    }
    against = study(figures, [statement])
    assert check(against, LINEAR).figure_count == 1
    found = finding(against, LINEAR)
    assert (found is not None) is contradicts
    if found is not None:
        assert found.published == pytest.approx(100 / 60 / 2)
        assert found.limit == 0.9


def test_the_detection_study_is_not_linear() -> None:
    against = Against(paper=load_paper("lamsal-2025"), pairs=())
    found = finding(against, LINEAR)
    assert found is not None
    assert found.published == pytest.approx(590.2 / 363.2 / 2)
    assert found.basis.startswith("1.63 times as fast on 2 times the devices")
    assert "81.3 %" in plausibility_section(against).table.columns[2].cells


def test_how_words_are_read_needs_words() -> None:
    with pytest.raises(ValidationError, match="there is no text"):
        Statement.model_validate(
            {"about": "map", "strategy": "ddp", "place": "table", "order": "lowest"}
        )
