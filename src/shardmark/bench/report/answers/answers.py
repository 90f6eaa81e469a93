"""Answers to the main questions: fastest, least memory, same training, and cautions."""

from __future__ import annotations

import shlex
import textwrap
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from shardmark.base.masking import shown_command
from shardmark.base.metrics import METRICS
from shardmark.base.ranking import Ranking
from shardmark.base.statistics.intervals import Estimate
from shardmark.base.table.table import Column, Table, metric_column, table_of
from shardmark.base.text import counted, listed
from shardmark.bench.analysis.advise.groups import ComparableGroup, groups_of, is_by_design
from shardmark.bench.analysis.advise.selection import mean_of, rival_of, select, times_better
from shardmark.bench.analysis.compare.comparison import Comparison
from shardmark.bench.analysis.compare.rounding import Rounding
from shardmark.bench.analysis.compare.rows import (
    COUNTED,
    Row,
    batch_norms_differ,
    gathered,
    main_rate,
    plain,
)
from shardmark.bench.analysis.compare.scaling import ranks_vary, scaling_points
from shardmark.bench.analysis.compare.verdicts import common_repeats
from shardmark.bench.report.answers.wording import name, rate, rounding_text, size

Topic = Literal["fastest", "memory", "equivalent", "caution"]
RATE, PEAK = "samples_per_second", "peak_memory_bytes"
LABELS = {"fastest": "Fastest", "memory": "Memory", "equivalent": "Same training?"}
MOST_REASON = 60
"""Largest number of characters of a deviation's cause beside an answer."""
MOST_EXCEPTIONS = 3
"""Largest number of groups that are named beside the most frequent winner."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A question about a comparison with its answer in one short line."""

    question: Topic
    decided: bool
    """True if the repeats and the verification decide the question."""
    strategy: str | None = None
    """The winner, or the strategy that deviates; None if there is none, or several."""
    text: str
    """The answer without the question: the strategy first, its rival in brackets."""
    ranks: int | None = None
    value: float | None = None
    unit: str | None = None
    runner_up: str | None = None
    ratio: float | None = None
    """The runner-up's value over the winner's."""
    same: tuple[str, ...] = ()
    """Strategies, with their ranks, that are too close to the best to tell."""


def answers(comparison: Comparison) -> list[Answer]:
    """Return cautions, then fastest, memory and equivalent; nothing if no trial has a result."""
    measured = [row for row in comparison.rows if row.ok_trials]
    if not measured:
        return []
    groups = _competing(comparison)
    axes = _axes(groups)
    labels = [", ".join(values[at] for values in axes.values()) for at in range(len(groups))]
    return [
        *(
            Answer(question="caution", decided=False, text=text)
            for text in _cautions(measured, groups)
        ),
        _over_groups("fastest", list(map(_fastest, groups)), labels),
        _over_groups("memory", list(map(_memory, groups)), labels),
        _equivalent(measured, comparison.rounding),
    ]


def answer_lines(comparison: Comparison) -> list[str]:
    """Return the answers as lines for a terminal: cautions, then answers behind their labels."""
    width = max(map(len, LABELS.values())) + 2
    return [
        f"{LABELS[answer.question]:<{width}}{answer.text}"
        if answer.question in LABELS
        else answer.text
        for answer in answers(comparison)
    ]


def next_commands(comparison: Comparison) -> list[str]:
    """Return commands to run next: disturbed trials again, more repeats, a missing verification."""
    measured = [row for row in comparison.rows if row.ok_trials and row.folder is not None]
    folders = dict.fromkeys(str(row.folder) for row in measured)
    if len(folders) != 1:
        return []
    (folder,) = folders
    all_answers = answers(comparison)
    experiment = shlex.quote(f"{folder}/experiment.yaml")
    again = f"shardmark run {experiment} --out {shlex.quote(folder)}"
    commands = []
    marked = any(row.disturbed_trials for row in measured)
    if marked or any(row.disturbed for row in measured):
        option = "--retry" if marked else "--remeasure"
        commands.append(f"Again, with other programs stopped:  {again} {option}")
    elif any(
        not answer.decided for answer in all_answers if answer.question in ("fastest", "memory")
    ) and _competing(comparison):
        repeats = max(len(row.trials) for row in measured)
        more = 3 if repeats < 3 else 2 * repeats
        commands.append(f"For narrower intervals:  {again} --set measure.repeats={more}")
    if ranks_vary(scaling_points(measured)):
        view = f"shardmark compare {shlex.quote(folder)} --view scaling"
        commands.append(f"Speed-up and efficiency (eff.), over the fewest ranks:  {view}")
    if any(not answer.decided for answer in all_answers if answer.question == "equivalent"):
        commands.append(f"Proof:  shardmark verify {experiment}")
    return commands


def _competing(comparison: Comparison) -> list[ComparableGroup]:
    return [group for group in groups_of(comparison.rows) if group.candidates]


def _cautions(measured: Sequence[Row], groups: Sequence[ComparableGroup]) -> list[str]:
    disturbed = [row for row in measured if row.disturbed]
    diverged = gathered((row.diverged, name(row)) for row in measured if row.diverged)
    texts = [f"{listed(names)}: {reason}." for reason, names in diverged.items()]
    if disturbed:
        names = listed([name(row) for row in disturbed])
        subject = "these times" if len(disturbed) == len(measured) else f"the times of {names}"
        texts.append(f"Do not trust {subject}: {disturbed[0].disturbed}.")
    if uncounted := [name(row) for row in measured if COUNTED in row.varied]:
        texts.append(
            f"The samples of {listed(uncounted)} could not be counted: a step counts as one sample."
        )
    left_out = sum(row.disturbed_trials for row in measured if not row.disturbed)
    if left_out:
        trials = counted(left_out, "disturbed trial") + " of other rows" * bool(disturbed)
        texts.append(f"The times of {trials} do not count.")
    most = max((len(row.ok_trials) for row in measured), default=0)
    if groups and len(disturbed) < len(measured) and most == 1:
        texts.append("Provisional: 1 repeat; the order may be chance.")
    elif unpaired := list(dict.fromkeys(text for group in groups for text in _unpaired(group))):
        share = "share" if len(unpaired) > 1 else "shares"
        texts.append(
            f"Provisional: {listed(unpaired)} {share} fewer than 2 repeats with the fastest;"
            " the order may be chance."
        )
    return texts


def _unpaired(group: ComparableGroup) -> list[str]:
    """Name the rows that share fewer than two repeats with the fastest row, too few for a test."""
    ranking = select(group.candidates, RATE)
    if ranking is None or ranking.reason == "disturbed":
        return []
    return [
        name(row, with_ranks=_several_sizes(group))
        for row in ranking.rivals
        if len(common_repeats(row, ranking.row, RATE)) < 2
    ]


def _fastest(group: ComparableGroup) -> Answer:
    ranking = select(group.candidates, RATE)
    if ranking is not None and ranking.reason == "disturbed":
        text = "not decided: the times are disturbed"  # the caution above has the cause
        return Answer(question="fastest", decided=False, text=text)
    if ranking is None:
        return Answer(question="fastest", decided=False, text="not measured")
    shown = main_rate(group.rows)
    best, value = ranking.row, _value(ranking.row, shown)
    figure = f"{rate(best, shown)} {METRICS[shown].unit}"
    ratio = None
    if (rival := rival_of(ranking)) is not None:
        ratio = times_better(rival, best, RATE)
        factor = "" if ratio is None else f", {ratio.value:.2f}x"
        rival_name = name(rival, with_ranks=_several_sizes(group))
        figure += f" ({rival_name} {rate(rival, shown)}{factor})"
    remarks = [*best.mathematics]
    ahead = max(group.by_design, key=partial(_value, metric=shown), default=None)
    if ahead is not None and not ahead.disturbed and _value(ahead, shown) > value:
        remarks.append(f"{ahead.label} {rate(ahead, shown)} trains differently")
    facts = {"value": value, "unit": METRICS[shown].unit, "ratio": ratio.value if ratio else None}
    return _answer(ranking, group, figure, remarks, facts)


def _memory(group: ComparableGroup) -> Answer:
    ranking = select(group.candidates, PEAK)
    if ranking is None:
        return Answer(question="memory", decided=False, text="not measured")
    value = mean_of(ranking.row, PEAK)
    figure = f"{size(value)} per rank"
    facts: dict[str, Any] = {"value": value, "unit": METRICS[PEAK].unit}
    if (rival := rival_of(ranking)) is not None:
        rival_name = name(rival, with_ranks=_several_sizes(group))
        figure += f" ({rival_name} {size(mean_of(rival, PEAK), value, unit=False)})"
        facts["ratio"] = mean_of(rival, PEAK) / value
    unmeasured = [row for row in group.rows if not row.ok_trials]
    out_of_memory = [name(row) for row in unmeasured if row.outcomes.get("out_of_memory")]
    remarks = [f"out of memory: {listed(out_of_memory)}"] if out_of_memory else []
    return _answer(ranking, group, figure, remarks, facts)


def _answer(
    ranking: Ranking[Row],
    group: ComparableGroup,
    figure: str,
    remarks: Sequence[str],
    facts: Mapping[str, Any],
) -> Answer:
    best, *close = (
        name(row, with_ranks=_several_sizes(group)) for row in (ranking.row, *ranking.close)
    )
    return Answer(
        question="memory" if ranking.question == "memory" else "fastest",
        decided=ranking.decided,
        strategy=None if close else ranking.row.strategy,
        text="; ".join([ranking.text(best, figure, close), *remarks]),
        ranks=ranking.row.world_size,
        runner_up=None if (rival := rival_of(ranking)) is None else name(rival),
        same=tuple(map(name, ranking.close)),
        **facts,
    )


def _equivalent(measured: Sequence[Row], rounding: Sequence[Rounding]) -> Answer:
    different = [row for row in measured if row.equivalent is False]
    by_design = list(dict.fromkeys(row.label for row in measured if is_by_design(row)))
    verified = [row for row in measured if row.equivalent is True]
    if different:
        row = different[0]
        cause = (row.deviation or "the cause is not known").split(";")[0]
        cause = textwrap.shorten(cause, MOST_REASON, placeholder=" ...")
        others = f" and {len(different) - 1} more" if len(different) > 1 else ""
        text = f"no: {name(row)}{others} ({cause})"
        return Answer(question="equivalent", decided=True, strategy=row.strategy, text=text)
    if not verified and not by_design:
        return Answer(question="equivalent", decided=False, text="not verified")
    decided = len(verified) + sum(map(is_by_design, measured)) == len(measured)
    inherit = [f"{name(row)} from {row.inherits}" for row in verified if row.inherits]
    text = f"{'yes' if decided else 'partly'}{':' if inherit else ','} "
    text += f"{len(verified) - len(inherit)} of {len(measured)}"
    if verified and all(row.is_script for row in verified):
        text += ": each trains the same as its script in one process"
        if len(verified) > 1 and all(row.against for row in verified):
            text += f", and the same as {shown_command(verified[0].against)}"
    else:
        text += " verified"
    if inherit:
        verb = "inherit" if len(inherit) > 1 else "inherits"
        shown = ", ".join([*inherit[:1], *(["..."] if inherit[1:] else [])])
        text += f", {len(inherit)} {verb} ({shown})"
    if by_design:
        text += f"; {listed(by_design)} {'differ' if len(by_design) > 1 else 'differs'} by design"
    accepted = list(dict.fromkeys(row.label for row in verified if row.accepted))
    if accepted:
        text += f"; {listed(accepted)} apart from what you accept"
    by_definition = list(
        dict.fromkeys(row.label for row in verified if row.mathematics and not row.accepted)
    )
    if by_definition:
        their = "their" if len(by_definition) > 1 else "its"
        text += f"; {listed(by_definition)} by {their} own definition"
    text += "".join(f"; {rounding_text(twin)}" for twin in rounding[:1])
    within = sum(1 + len(twin.same) for twin in rounding[:1])
    if within < len(measured) and batch_norms_differ(measured):
        text += "; qualities depend on the ranks, since batch norm sees one rank's share of a batch"
    return Answer(question="equivalent", decided=decided, text=text)


def _over_groups(question: Topic, by_group: Sequence[Answer], labels: Sequence[str]) -> Answer:
    """Return the answer of a single group; for several, the most frequent winner and exceptions."""
    if not by_group:
        text = "not decided: no strategy both trains as the reference does and has a finite loss"
        return Answer(question=question, decided=False, text=text)
    if len(by_group) == 1:
        return by_group[0]
    winners = [answer.strategy if answer.decided else None for answer in by_group]
    wins = Counter(strategy for strategy in winners if strategy is not None)
    if not wins:
        text = f"not decided in any of {len(by_group)} groups"
        return Answer(question=question, decided=False, text=text)
    (winner, most), *others = wins.most_common()
    parts = [f"{winner} in {most} of {len(by_group)} groups"]
    for strategy, _ in others[:MOST_EXCEPTIONS]:
        parts.append(f"{strategy} for {labels[winners.index(strategy)]}")
    if rest := winners.count(None):
        parts.append(f"{rest} not decided")
    return Answer(question=question, decided=not rest, strategy=winner, text="; ".join(parts))


def answer_grid(comparison: Comparison) -> Table | None:
    """Return a table of the best strategy in every group of a matrix; None for a single group."""
    groups = _competing(comparison)
    if len(groups) < 2:
        return None
    axes = _axes(groups)
    lines = [
        _GridLine(
            group=group,
            place={axis: values[at] for axis, values in axes.items()},
            rankings={metric: select(group.candidates, metric) for metric in (RATE, PEAK)},
        )
        for at, group in enumerate(groups)
    ]

    def axis_column(axis: str) -> tuple[Column, Callable[[_GridLine], str]]:
        return Column(axis, numeric=False, names_row=True), lambda line: line.place[axis]

    speed = _shown_rate(groups)
    fastest = Column("fastest", numeric=False)
    least_memory = Column("memory", "least memory", numeric=False)
    return table_of(
        "Best strategy by group",
        lines,
        [
            *map(axis_column, axes),
            (fastest, lambda line: line.best_row_text(RATE)),
            (metric_column(speed), lambda line: line.value(RATE, speed)),
            (least_memory, lambda line: line.best_row_text(PEAK)),
            (metric_column(PEAK), lambda line: line.value(PEAK, PEAK)),
        ],
        axis_lines(groups),
    )


def axis_lines(groups: Sequence[ComparableGroup]) -> list[str]:
    """Return a sentence for each value of an axis: its effect where all else is the same.

    The best row of a group is compared with the same strategy's row at the axis' first value.
    """
    lines = []
    rate_name = _shown_rate(groups)
    axes = _axes(groups)
    by_place = dict(zip(zip(*axes.values(), strict=True), groups, strict=True))
    for at, (axis, (first, *_)) in enumerate(axes.items()):
        ratios: dict[str, list[float]] = {}
        for place, group in by_place.items():
            reference = by_place.get((*place[:at], first, *place[at + 1 :]))
            if reference is None or reference is group:
                continue
            ranking = select(group.candidates, RATE)
            if ranking is None or ranking.reason == "disturbed":
                continue
            best = ranking.row
            ratios.setdefault(place[at], []).extend(
                _value(best, rate_name) / _value(row, rate_name)
                for row in reference.candidates
                if (row.label, row.world_size) == (best.label, best.world_size)
                and _value(row, rate_name)
                and not row.disturbed
            )
        for value, factors in ratios.items():
            if factors:
                low, high = min(factors), max(factors)
                factor = f"{low:.2f}x" if high / low < 1.02 else f"{low:.2f}x to {high:.2f}x"
                unit = METRICS[rate_name].unit
                lines.append(f"{axis} {value} against {first}: {factor} the {unit}.")
    return lines


def _shown_rate(groups: Sequence[ComparableGroup]) -> str:
    return main_rate([row for group in groups for row in group.rows])


def _axes(groups: Sequence[ComparableGroup]) -> dict[str, list[str]]:
    """Return axis -> its value in each group, for the axes in which groups differ."""
    axes = {
        key: [str(getattr(group.rows[0], key)) for group in groups]
        for key in ("experiment", "workload", "precision")
    }
    keys = dict.fromkeys(key for group in groups for key in group.varied)
    if any(key.startswith("workload") for key in keys):
        del axes["workload"]
    for key in keys:
        axes[key.rpartition(".")[2]] = [plain(group.varied.get(key, "")) for group in groups]
    return {axis: values for axis, values in axes.items() if len(set(values)) > 1}


def _several_sizes(group: ComparableGroup) -> bool:
    """Return True if a strategy has rows with different numbers of ranks."""
    sizes = {(row.label, row.world_size) for row in group.rows}
    return len(sizes) > len({label for label, _ in sizes})


def _value(row: Row, metric: str) -> float:
    estimate = row.metrics.get(metric)
    return 0.0 if estimate is None else estimate.value


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _GridLine:
    group: ComparableGroup
    place: Mapping[str, str]
    """Axis -> its value in the group."""
    rankings: Mapping[str, Ranking[Row] | None]

    def best_row_text(self, metric: str) -> str | None:
        ranking = self.rankings[metric]
        if ranking is None or ranking.reason == "disturbed":
            return None if ranking is None else "not decided"
        text = name(ranking.row, with_ranks=_several_sizes(self.group))
        return f"{text} ({ranking.reason})" if ranking.close else text

    def value(self, metric: str, shown: str) -> Estimate | None:
        """Return the shown metric of the row that is best by the first metric."""
        ranking = self.rankings[metric]
        return None if ranking is None else ranking.row.metrics[shown]
