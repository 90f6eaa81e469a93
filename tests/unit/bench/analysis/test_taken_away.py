"""Parts of a step follow from its times without one thing after the other."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from shardmark.base.results.schema import CollectiveRecord
from shardmark.base.statistics.intervals import Estimate
from shardmark.bench.analysis.parts import Part
from shardmark.bench.analysis.taken_away import (
    ALL,
    EQUAL_ROWS,
    LOOK,
    OWN_ROWS,
    PLAIN,
    Sample,
    Samples,
    explanation_of,
    rows_vary,
    sample_of,
)
from shardmark.bench.report.answers.parts import (
    answer_of,
    cause_of,
    facts_of,
    lines_of,
    scaling_lines,
)
from shardmark.bench.report.figures.measured import parts_by_ranks

NOISE = (0.001, -0.001, 0.0005)
QUIET: dict[str, Any] = {
    "looks": 1000, "shares": {}, "lines": {}, "functions": [], "rows": [64],
    "trained_tensors": 6, "trained_bytes": 4000,
}  # fmt: skip


def sample(step_seconds: float, *ranks: float, seen: Any = None, **spans: float) -> Sample:
    """A trial; the last rank's spans are given, the others' are zero."""
    zero = dict.fromkeys(("data", "forward", "backward", "optimizer"), 0.0)
    facts = seen or [{}] * max(1, len(ranks))
    records = [SimpleNamespace(settings={"seen": fact}, probe=None) for fact in facts]
    result: Any = SimpleNamespace(ranks=records, disturbed=None)
    steps = [zero | {"step": seconds} for seconds in (ranks or (step_seconds,))]
    steps[-1] |= spans
    return Sample(step_seconds=step_seconds, ranks=tuple(steps), result=result)


def samples(variants: dict[str, Any], *seen: dict[str, Any], noise: Any = NOISE) -> Samples:
    """Three rounds of variants, each with the seconds of a step and of its ranks' own steps."""
    seen = seen or (QUIET, QUIET)
    by_variant: dict[str, dict[int, Sample]] = {
        LOOK: {0: sample(0.1, *[0.1] * len(seen), seen=[{"Look": facts} for facts in seen])}
    }
    for name, (seconds, *ranks) in variants.items():
        facts = [{"SwapPlaces": {"swapped": True}}] * len(seen) if name == "places" else None
        late = max(ranks, default=0.0) - min(ranks, default=0.0)
        by_variant[name] = {
            number: sample(seconds + shift, *ranks, seen=facts, backward=late)
            for number, shift in enumerate(noise)
        }
    return Samples(len(seen), by_variant, stripped=ALL if ALL in variants else "no_peers")


def looked(**shares: float) -> dict[str, Any]:
    lines = {kind: [[f"train.py:{len(kind)}", share]] for kind, share in shares.items()}
    return {**QUIET, "shares": shares, "lines": lines}


def test_what_is_saved_without_a_thing_is_its_part() -> None:
    found = explanation_of(
        samples(
            {
                PLAIN: (0.100,), "same_batch": (0.070,), "no_peers": (0.085,),
                ALL: (0.055, 0.055, 0.055),
            },
            looked(input=0.3), looked(input=0.3),
        ),
        ["same_batch", "no_peers"],
    )  # fmt: skip
    assert [part.kind for part in found.parts] == ["input", "communication"]
    assert [part.seconds.value for part in found.parts] == pytest.approx([0.030, 0.015])
    assert found.lost.value == pytest.approx(0.045)
    assert found.parts[0].rank is None
    assert answer_of(found) == (
        "Of 100 ms a step, 45 are lost: 30 waiting for input (train.py:5), "
        "15 communication that nothing hides."
    )
    assert facts_of(found)["computing_seconds"] == pytest.approx(0.055, rel=0.01)


def test_shorter_batches_of_the_warm_up_are_no_input() -> None:
    """Loading is tried for rows of other sizes; nobody was seen to wait for it."""
    times = {PLAIN: (0.1,), "same_batch": (0.08,), "no_peers": (0.1,), ALL: (0.08, 0.08, 0.08)}
    found = explanation_of(
        samples(times, looked(input=0.01), looked(input=0.01)), ["same_batch", "no_peers"]
    )
    assert (found.parts, found.undecided, found.lost.value) == ((), (), 0.0)


def test_the_rank_that_loads_slowly_is_named() -> None:
    times = {PLAIN: (0.1,), "same_batch": (0.07,), "no_peers": (0.1,), ALL: (0.07, 0.07, 0.07)}
    found = explanation_of(
        samples(times, looked(input=0.01), looked(input=0.3)), ["same_batch", "no_peers"]
    )
    assert [(part.kind, part.rank) for part in found.parts] == [("input", 1)]


@pytest.mark.parametrize(
    ("moves", "lateness"), [("rows", "rows"), ("places", "place"), (None, "own work")]
)
def test_a_late_rank_is_explained_by_what_its_lateness_moves_with(
    moves: str | None, lateness: str
) -> None:
    stays, moved = (0.1, 0.07, 0.1), (0.1, 0.1, 0.07)
    variants = {
        PLAIN: (0.1,), "no_peers": (0.1, 0.07, 0.1),
        "rows": moved if moves == "rows" else stays,
        "places": moved if moves == "places" else stays,
    }  # fmt: skip
    (part,) = explanation_of(samples(variants), ["no_peers"]).parts
    assert (part.kind, part.rank, part.lateness) == ("late_rank", 1, lateness)
    assert part.seconds.value == pytest.approx(0.03)
    assert part.phase == "backward"


@pytest.mark.parametrize("swaps", [("places",), ("rows",), ("places", "rows")])
def test_a_rank_that_is_late_by_chance_is_not_named(swaps: tuple[str, ...]) -> None:
    """It is late in no trial in which ranks swap, neither where it was nor where it would move."""
    alike = (0.1, 0.1, 0.1)
    late = samples({PLAIN: (0.1,), "no_peers": (0.1, 0.07, 0.1)} | dict.fromkeys(swaps, alike))
    more = dict.fromkeys(range(12), late.by_variant["no_peers"][0])
    late.by_variant["no_peers"] = more
    found = explanation_of(late, ["no_peers"])
    assert (found.parts, [part.kind for part in found.undecided]) == ((), ["late_rank"])


def test_no_cause_of_lateness_is_named_that_was_not_tried() -> None:
    """The budget ended before the ranks exchanged rows and places."""
    found = explanation_of(samples({PLAIN: (0.1,), ALL: (0.1, 0.07, 0.1)}), ["no_peers"])
    (part,) = found.parts
    assert (part.kind, part.rank, part.lateness) == ("late_rank", 1, None)
    assert "not tried" in answer_of(found)


def test_own_work_is_not_named_where_rows_are_unknown_and_not_exchanged() -> None:
    late = (0.1, 0.07, 0.1)
    variants = {PLAIN: (0.1,), "no_peers": late, "places": late}
    unknown = {**QUIET, "rows": []}
    for seen, lateness in ((QUIET, "own work"), (unknown, None)):
        (part,) = explanation_of(samples(variants, seen, seen), ["no_peers"]).parts
        assert part.lateness == lateness


@pytest.mark.parametrize(
    ("one", "other", "vary"),
    [
        ([32, 128, 32, 32, 128], [128, 32, 128, 128, 32], True),  # both long and short ones
        ([64, 64, 64], [64, 64, 64], False),
        ([64, 64, 64], [96, 96, 96], False),  # one rank has larger batches
        ([60, 62, 61, 60, 63], [90, 95, 92, 91, 94], False),
        ([64], [96], False),  # too few to tell
        ([], [], False),
    ],
)
def test_sizes_of_batches_vary_by_chance_or_by_rank(
    one: list[int], other: list[int], vary: bool
) -> None:
    assert rows_vary([{"rows": one}, {"rows": other}]) is vary


def test_a_rank_that_stays_late_with_equal_rows_does_work_of_its_own() -> None:
    """Sizes vary by chance, so that the ranks had those of rank 0 all the time."""
    late = (0.1, 0.07, 0.1)
    variants = {PLAIN: (0.1,), ALL: late, "places": late}
    seen = {**QUIET, "rows": [32, 128, 32, 128]}
    (part,) = explanation_of(samples(variants, seen, seen), ["no_peers"]).parts
    assert (part.rank, part.lateness) == (1, "own work")


@pytest.mark.parametrize(
    ("seen", "named"),
    [({}, True), ({"passes": 1}, False), ({"wrappers": ["DistributedDataParallel"]}, True)],
    ids=["accumulation", "one pass", "a wrapper"],
)
def test_gradients_are_reduced_again_only_if_several_passes_made_them(
    seen: dict[str, Any], named: bool
) -> None:
    """Layers that ranks divide, and metrics, reduce in a single pass as much and as often."""
    facts = looked() | {"passes": 2, "link_bytes_per_second": 1e9} | seen
    found = samples({PLAIN: (0.1,), "no_peers": (0.08, 0.08, 0.08)}, facts, facts)
    rank: Any = found.by_variant[LOOK][0].result.ranks[0]
    record = CollectiveRecord(calls=3, payload_bytes=3 * facts["trained_bytes"])
    rank.probe = SimpleNamespace(collectives={"all_reduce": record})
    explanation = explanation_of(found, ["no_peers"])
    assert bool(explanation.findings) == bool(explanation.parts) == named


def test_communication_that_was_not_counted_is_not_called_without_a_fault() -> None:
    """The script ended before the steps in which collectives are counted."""
    facts = looked() | {"link_bytes_per_second": 1e9}
    found = samples({PLAIN: (0.1,), "no_peers": (0.08, 0.08, 0.08)}, facts, facts)
    text = "\n".join(lines_of(explanation_of(found, ["no_peers"])))
    assert "20 are communication." in text
    assert "before its collectives were counted" in text


@pytest.mark.parametrize(("tensors", "named"), [(6, False), (40, True)])
def test_few_reductions_beside_a_wrappers_are_no_fault(tensors: int, named: bool) -> None:
    """Metrics may be as many as the tensors of a small model; norms of all tensors are a fault."""
    facts = looked() | {"link_bytes_per_second": 1e9, "wrappers": ["DistributedDataParallel"]}
    facts["trained_tensors"] = tensors
    found = samples({PLAIN: (0.1,), "no_peers": (0.08, 0.08, 0.08)}, facts, facts)
    rank: Any = found.by_variant[LOOK][0].result.ranks[0]
    record = CollectiveRecord(calls=tensors + 1, payload_bytes=facts["trained_bytes"] + 24)
    rank.probe = SimpleNamespace(collectives={"all_reduce": record})
    assert bool(explanation_of(found, ["no_peers"]).findings) == named


@pytest.mark.parametrize(
    ("facts", "named"),
    [({}, True), ({"looks": 6}, False), ({"on_gpu": True}, False)],
    ids=["watched", "few looks", "a GPU"],
)
def test_own_code_is_not_named_where_looks_cannot_tell(facts: dict[str, Any], named: bool) -> None:
    """Beside a GPU the main thread waits in `loss.item()` for what the GPU computes."""
    seen = [looked(own_code=0.6) | facts] * 2
    found = explanation_of(samples({PLAIN: (0.1,), "no_peers": (0.1, 0.1, 0.1)}, *seen), [])
    assert bool(found.parts) == named
    assert any("not told" in note for note in found.notes) == ("on_gpu" in facts)


def test_no_more_is_lost_than_a_step_takes() -> None:
    """Own code was watched in another trial than the one that the input was taken from."""
    seen = looked(input=0.5, own_code=0.5)
    found = explanation_of(samples({PLAIN: (0.1,), "same_batch": (0.04,)}, seen), ["same_batch"])
    assert found.lost.value == pytest.approx(found.step.value)
    assert found.computing_seconds == pytest.approx(0.0)


def test_a_late_ranks_own_code_is_lost_once() -> None:
    times = {PLAIN: (0.1,), ALL: (0.1, 0.07, 0.1)}
    found = explanation_of(samples(times, looked(), looked(own_code=0.3)), ["no_peers"])
    assert {part.kind for part in found.parts} == {"late_rank", "own_code"}
    assert found.lost.value == pytest.approx(0.03, rel=0.01)


def test_a_rank_is_late_in_its_own_code_between_the_passes() -> None:
    """It counts to the forward pass, which is not named for it; and it is told once."""
    seen = (looked(), looked(own_code=0.3))
    late = samples({PLAIN: (0.1,), ALL: (0.1, 0.07, 0.1)}, *seen)
    late.by_variant[ALL] = {round_: sample(0.1, 0.07, 0.1, forward=0.03) for round_ in range(3)}
    (part,) = explanation_of(late, ["no_peers"]).parts
    assert (part.kind, part.rank, part.phase, part.place) == (
        "late_rank", 1, "own_code", "train.py:8",
    )  # fmt: skip
    assert "own code between the passes (train.py:8)" in cause_of(part)


def test_waiting_for_the_longest_rows_is_no_communication() -> None:
    variants = {
        PLAIN: (0.1,), "no_peers": (0.06, 0.06, 0.05), "rows": (0.06, 0.05, 0.06),
        OWN_ROWS: (0.1,), EQUAL_ROWS: (0.075,),
    }  # fmt: skip
    first, second = explanation_of(samples(variants), ["no_peers"]).parts
    assert (first.kind, first.rank, first.lateness) == ("late_rank", None, "rows")
    assert first.seconds.value == pytest.approx(0.025, rel=0.05)
    assert second.kind == "communication"
    assert second.seconds.value == pytest.approx(0.015, rel=0.05)


@pytest.mark.parametrize(
    ("rows", "rank"),
    [
        (([20, 30, 25, 22], [50, 55, 60, 52], [80, 90, 85, 95]), 2),
        (([80, 90, 85, 95], [50, 55, 60, 52], [20, 30, 25, 22]), 0),
        (([20, 30, 25, 22], [81, 92, 83, 96], [80, 90, 85, 95]), None),  # two have longer ones
        (([20, 90, 55, 22], [80, 25, 60, 52], [30, 90, 45, 75]), None),  # they vary by chance
        (([20], [50], [90]), None),
    ],
)
def test_the_rank_that_always_gets_the_longest_rows_is_named(
    rows: tuple[list[int], ...], rank: int | None
) -> None:
    variants = {
        PLAIN: (0.1,), "no_peers": (0.06, 0.05, 0.05, 0.06), OWN_ROWS: (0.1,), EQUAL_ROWS: (0.07,)
    }  # fmt: skip
    found = explanation_of(samples(variants, *[{**QUIET, "rows": r} for r in rows]), ["no_peers"])
    part = next(part for part in found.parts if part.lateness == "rows")
    assert (part.kind, part.rank) == ("late_rank", rank)


@pytest.mark.parametrize(
    ("calls", "payload_bytes", "link", "lost"),
    [(2, 4000, 1e6, False), (2, 4000, 1e5, True), (6, 4000, 1e6, True), (2, 8000, 1e6, True)],
)
def test_communication_is_lost_if_the_link_is_thin_or_too_much_is_reduced(
    calls: int, payload_bytes: float, link: float, lost: bool
) -> None:
    """4,000 bytes of six tensors are sent once: 4 ms of 85 on a link of 1 MB/s, 40 on another."""
    times = {PLAIN: (0.1,), "no_peers": (0.085, 0.085, 0.085)}
    found = samples(times, looked() | {"passes": 2}, looked())
    look = found.by_variant[LOOK][0]
    for seen in look.seen("Look"):
        seen["link_bytes_per_second"] = link
    record = CollectiveRecord(calls=calls, payload_bytes=payload_bytes)
    rank: Any = look.result.ranks[0]
    rank.probe = SimpleNamespace(collectives={"all_reduce": record})
    explanation = explanation_of(found, ["no_peers"])
    assert [part.kind for part in explanation.parts] == ["communication"] * lost
    assert explanation.lost.value == pytest.approx(0.015 * lost)
    facts = facts_of(explanation)
    assert facts["computing_seconds"] == pytest.approx(0.085, rel=0.01)
    assert facts["counts"]["sent_bytes"] == payload_bytes, "2 (n - 1) / n of it"
    assert (facts["communication_seconds"] is None) == lost
    if not lost:
        assert answer_of(explanation) == (
            "Nothing is shown to be lost of 100 ms a step; 15 are communication without a fault."
        )
        assert "2 collectives, 0.004 MB, for which the link alone would take 4 ms" in "\n".join(
            lines_of(explanation)
        )
        title, *_, row, _, note = scaling_lines([explanation])
        assert ("_" in title, row.split()[-2:]) == (False, ["15.0", "±0"])
        assert "`shardmark time` has the speed-up" in note
        (drawn,) = parts_by_ranks([explanation])
        bars = {series.name: series.y for series in drawn.panels[0].series}
        assert bars == {"computing": pytest.approx((85.2,), rel=1e-3), "communication": (15.0,)}


@pytest.mark.parametrize(
    ("wrapper", "share"),
    [("DistributedDataParallel", 0.1), ("DistributedDataParallel", 0.04), ("compile", 0.1)],
)
def test_collectives_beside_those_of_a_wrapper_are_not_needed(wrapper: str, share: float) -> None:
    """A rank waits in them for a late one: the one that spends least there has what they take."""
    times = {PLAIN: (0.1,), "no_peers": (0.075, 0.075, 0.075)}
    seen = [looked(communication=one) | {"wrappers": [wrapper]} for one in (0.3, share)]
    found = samples(times, *seen)
    for rank in found.by_variant[LOOK][0].seen("Look"):
        rank["link_bytes_per_second"] = 1e6
    first: Any = found.by_variant[LOOK][0].result.ranks[0]
    record = CollectiveRecord(calls=2, payload_bytes=4000)
    first.probe = SimpleNamespace(collectives={"all_reduce": record})
    explanation = explanation_of(found, ["no_peers"])
    assert explanation.needed is not None
    named = (wrapper, share) == ("DistributedDataParallel", 0.1)
    assert explanation.needed.seconds.value == pytest.approx(0.025 - 0.01 * named, rel=0.01)
    if not named:  # gradients may be reduced there; a trainer counts tokens of all ranks
        assert explanation.parts == ()
        return
    assert answer_of(explanation) == (
        "Of 100 ms a step, 10 are lost: 10 collectives beside those of the gradients "
        "(train.py:13); 15 are communication without a fault."
    )
    assert explanation.computing_seconds == pytest.approx(0.075, rel=0.01)
    assert lines_of(explanation)[2].endswith("(train.py:13) [watched, not taken away]")


def test_no_more_is_lost_than_all_parts_and_the_rest_adds_up() -> None:
    """More may be gone without all of them, as the variants' times scatter."""
    variants = {PLAIN: (0.1,), "no_checkpoint": (0.08,), ALL: (0.07, 0.07, 0.07)}
    found = explanation_of(samples(variants), ["no_checkpoint"])
    assert found.lost.value == pytest.approx(0.02, rel=0.01)
    rest = found.step.value - found.lost.value
    assert found.computing_seconds == pytest.approx(rest)


def test_nothing_is_named_without_a_loss_and_without_precision() -> None:
    quiet = {PLAIN: (0.1,), "no_peers": (0.1, 0.1, 0.1)}
    found = explanation_of(samples(quiet), ["no_peers"])
    assert not found.parts
    assert "Of 100 ms a step, nothing is lost" in answer_of(found)
    assert "Of 100 ms a step on 1 rank, nothing is lost" in answer_of(replace(found, ranks=1))
    assert lines_of(found)[2:] == ["  100 ms  computing"]
    noisy = samples(quiet)
    noisy.by_variant["no_peers"][0] = sample(0.060, 0.1, 0.1)
    found = explanation_of(noisy, ["no_peers"])
    assert not found.parts
    assert "Not decided by these rounds: communication" in answer_of(found)
    assert "  100 ms  computing, with what is not decided" in lines_of(found)


def test_one_round_does_not_show_that_nothing_is_lost() -> None:
    one = samples({PLAIN: (0.1,), "no_peers": (0.1, 0.1, 0.1)}, noise=(0.0,))
    answer = answer_of(explanation_of(one, ["no_peers"]))
    assert answer.startswith("Nothing is shown to be lost of 100 ms a step in 1 round")


@pytest.mark.parametrize(("seconds", "more"), [(0.04, True), (0.06, False)])
def test_steps_that_scale_better_than_possible_are_doubted(seconds: float, more: bool) -> None:
    """Numbers of ranks are measured one after another, and other programs come and go."""
    one, two = (
        explanation_of(samples({PLAIN: (s,), "no_peers": (s, s, s)}), ["no_peers"])
        for s in (0.1, seconds)
    )
    text = " ".join(scaling_lines([replace(one, ranks=1), replace(two, ranks=2)]))
    assert ("More ranks gain more than their number" in text) == more


def test_a_part_of_less_than_nothing_is_none() -> None:
    part = Part(kind="input", seconds=Estimate(value=-1.65e-8, low=-0.02, high=0.0127, n=9))
    quiet = explanation_of(samples({PLAIN: (0.1,), "no_peers": (0.1, 0.1, 0.1)}), ["no_peers"])
    assert "waiting for input (0 ms (0 to 12.7))" in answer_of(replace(quiet, undecided=(part,)))


def test_a_step_of_seconds_has_no_exponent() -> None:
    found = explanation_of(samples({PLAIN: (1.5,), "no_peers": (1.5, 1.5, 1.5)}), ["no_peers"])
    assert "Of 1500 ms a step, nothing is lost" in answer_of(found)


def test_what_could_not_be_taken_away_is_not_called_computing() -> None:
    only = samples({PLAIN: (0.1,), "no_update": (0.11,)})
    only.failures["no_peers"] = "KeyError: 0"
    found = explanation_of(only, ["no_peers"])
    assert answer_of(found) == (
        "Nothing is shown to be lost of 100 ms a step.  "
        "Not known: communication that nothing hides."
    )
    assert found.update is None, "no update takes less than nothing"
    times = {PLAIN: (0.1,), "same_batch": (0.07,), "no_peers": (0.08,)}
    both = samples(times, looked(input=0.3), looked(input=0.3))
    both.stripped = ALL
    found = explanation_of(both, ["same_batch", "no_peers"])
    assert found.lost.value == pytest.approx(0.03), "at least the largest part"


def test_the_scripts_own_code_is_watched_and_told_apart() -> None:
    times = {PLAIN: (0.1,), "no_peers": (0.1, 0.1, 0.1)}
    found = explanation_of(samples(times, looked(own_code=0.3), looked()), ["no_peers"])
    (part,) = found.parts
    assert (part.kind, part.rank, part.place, part.known_by) == (
        "own_code", 0, "train.py:8", "watched",
    )  # fmt: skip
    assert "watched, not taken away" in "\n".join(lines_of(found))


@pytest.mark.parametrize(("printed", "kind"), [(0.1, "own_code"), (0.07, "logging")])
def test_what_a_print_computes_is_own_code(printed: float, kind: str) -> None:
    """A line with a print takes 30 ms, which stay or go when nothing is printed."""
    times = {PLAIN: (0.1,), "no_peers": (0.1, 0.1, 0.1), "no_logging": (printed,)}
    seen = looked(logging=0.3), looked(logging=0.3)
    (part,) = explanation_of(samples(times, *seen), ["no_peers", "no_logging"]).parts
    assert (part.kind, part.place) == (kind, "train.py:7")
    assert part.seconds.value == pytest.approx(0.03, rel=0.01)


def test_steps_after_the_end_of_the_first_rank_do_not_count() -> None:
    def line(rank: int, start: float, seconds: float) -> dict[str, Any]:
        spans = {f"{name}_seconds": None for name in ("data", "backward", "optimizer")}
        times = {"started_at_seconds": start, "step_seconds": seconds}
        return {"rank": rank, "measured": True, **times, **spans}

    window = SimpleNamespace(first_step=0, end_step=2, window_seconds=3.0)
    result: Any = SimpleNamespace(ranks=[SimpleNamespace(windows=[window])])
    lines = [line(0, 0.0, 1.0), line(0, 1.0, 1.0), line(1, 0.0, 2.0), line(1, 2.0, 1.0)]
    found = sample_of(result, lines)
    assert [rank["step"] for rank in found.ranks] == [1.0, 2.0]
    assert found.step_seconds == 1.5
