"""Shows a plan as answers, tables and JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields, replace
from functools import partial
from math import inf
from operator import attrgetter
from typing import Any

from shardmark.base.cells import title_of
from shardmark.base.durations import duration
from shardmark.base.layout import Mesh
from shardmark.base.ranking import Ranking
from shardmark.base.statistics.intervals import Estimate
from shardmark.base.table.formats import Format, records, render_points, render_tables
from shardmark.base.table.table import (
    BYTES,
    Column,
    Columns,
    Missing,
    Table,
    Value,
    abbreviated,
    for_programs,
    metric_column,
    number,
    strategy_column,
    table_of,
)
from shardmark.base.text import as_text, counted, listed, render_json, with_options
from shardmark.bench.analysis.compare.rows import gathered, grouped
from shardmark.predict.memory import RankMemory
from shardmark.predict.plan import HOUR_SECONDS, MINIMISED, TOO_LARGE, Plan, Prediction
from shardmark.predict.remedies import Remedy
from shardmark.predict.search.search import Candidate, Search
from shardmark.predict.timing import Stack
from shardmark.predict.when.view import planned_tables

SOFTWARE: Mapping[Stack, str] = {
    "eager": "without FlashAttention (--stack fused: with it)",
    "fused": "with FlashAttention (--stack eager: without)",
}
MOST_ROWS = 12
"""Largest number of cells that are all shown."""


def render_plan(
    plan: Plan,
    form: Format,
    width: int | None,
    *,
    memory: bool = False,
    speed: bool = False,
    best_of_each: bool = False,
    when: bool = False,
) -> str:
    """Return answers, a table and notes, with a line break at the end.

    `memory` adds the parts of the memory, `speed` those of the time.  `best_of_each` shows one row
    for each kind of machine, and `when` only the best strategy in each range of an axis.
    """
    ranges = planned_tables(plan) if when else []
    if form is Format.JSON:
        lines = [record for table in ranges for record in records(table)]
        by_range = {"when": lines} if when else {}
        return render_json(plan_json(plan) | by_range | {"assumed": plan.assumed})
    if when:
        notes = [*_deviation_notes(plan.rows), *_last_notes(plan)]
        points = [render_points(notes, form, width)] if notes else []
        return "\n".join([render_tables(ranges, form, width), *points])
    made = [
        *([] if _fails(plan) else [answer_table(plan, best_of_each=best_of_each)]),
        *([memory_table(plan)] if memory else ()),
        *([speed_table(plan)] if speed else ()),
        remedies_table(plan),
        *search_tables(plan),
    ]
    tables = [table for table in made if table.rows]
    answered = [*_answers(plan)]
    reasons = {row.reason for row in plan.rows} - {None}
    is_answered = len(reasons) == 1 and any(str(*reasons) in answer for answer in answered)
    last = [*plan.notes] if is_answered else _last_notes(plan)
    parts = [
        render_points(answered, form, width),
        render_tables(tables, form, width) if tables else "",
        render_points(last, form, width) if last else "",
    ]
    return "\n".join(filter(None, parts))


def _fails(plan: Plan) -> bool:
    """Return whether the remedies of one kind of machine replace its rows, none of which fits."""
    return bool(plan.remedies) and not any(row.fits or row.on for row in plan.rows)


def plan_json(plan: Plan) -> dict[str, Any]:
    """Return `answers` in the form of `compare`, `rows` in base units, and `notes`."""
    answers = [
        {
            "question": best.question,
            "decided": best.decided,
            "strategy": best.row.strategy,
            "nodes": best.row.nodes,
            "ranks": best.row.ranks,
            "text": text_of(best, part),
            "task": best.row.task,
        }
        for part in plan.by_task
        for best in part.best
    ]
    names = ("strategy", "strategy_options", "varied", "on", "nodes", "ranks", "devices", "samples")
    identity: Columns[Prediction] = [(for_programs(name), attrgetter(name)) for name in names]
    columns = [*identity, *_speed(plan), *_memory(plan.rows), *_for_programs()]
    rows = records(table_of("", plan.rows, columns))
    return {
        "experiment": plan.experiment,
        "on": plan.on,
        "stack": plan.stack,
        "measured": plan.anchored,
        "answers": answers,
        "rows": rows,
        "fewest": None if plan.fewest is None else asdict(plan.fewest),
        "remedies": [asdict(remedy) for remedy in plan.remedies],
        "search": None if plan.search is None else _search_json(plan, plan.search),
        "notes": [*plan.doubts, _range_note(plan), *_last_notes(plan)],
    }


def text_of(best: Ranking[Prediction], plan: Plan) -> str:
    """Return an answer in sentences, with close rivals and deviating training."""
    row = best.row
    figures = {"fastest": _speed_text, "memory": _memory_text}
    figure = figures.get(best.question, partial(_cost_text, plan=plan))
    text = _brief_text(best, figure(row))
    if row.own_mathematics:
        text += f" By its own definition: {'; '.join(row.own_mathematics)}."
        exact = next((rival for rival in best.rivals if not rival.own_mathematics), None)
        if exact is not None:
            text += f" Training as one device would: {exact.place}, {figure(exact)}."
    return text


def _brief_text(best: Ranking[Prediction], figure: str) -> str:
    """Return an answer with close rivals."""
    doubt = " if its memory suffices (tight)" if best.row.fit == "tight" else ""
    close = [row.label if row.on is None else f"{row.label} on {row.on}" for row in best.close]
    return best.text(f"{best.row.place}{doubt}", figure, close, in_sentences=True)


def _speed_text(row: Prediction) -> str:
    assert row.time is not None
    return f"{abbreviated(row.work_per_second)} {row.unit}/s, {row.time.bound}-bound"


def _memory_text(row: Prediction) -> str:
    assert row.device_bytes is not None
    needed, card = (size / 2**30 for size in (row.device_bytes, row.card_bytes))
    size_text = _gib(needed) if needed >= 1 else f"{number(1024 * needed, digits=3)} MiB"
    return f"{size_text} of {_gib(card)} GiB of each card"


def _cost_text(row: Prediction, plan: Plan) -> str:
    hours, dollars = row.hours_for(plan.work), row.dollars_for(plan.work)
    subject = "the recipe" if plan.work is None else work_text(plan)
    if dollars is not None and hours is not None:
        took = f"{number(hours, digits=2)} hours" if hours >= 1 else duration(hours * HOUR_SECONDS)
        return f"{number(dollars, digits=2)} dollars and {took} for {subject}"
    if hours is None:  # a recipe without a number of steps
        hours, subject = row.hours_for(1e6 * (row.tokens_per_sample or 1)), "a million samples"
    return f"{number(row.devices * (hours or 0.0), digits=2)} GPU-hours for {subject}"


def _gib(gibibytes: float) -> str:
    return number(gibibytes, digits=3)


def work_text(plan: Plan) -> str:
    """Return the work that a plan prices; samples of a language model with their tokens."""
    assert plan.work is not None, "checked by the caller"
    text = amount(plan.work, plan.unit)
    if plan.requested_samples is None:
        return text
    return f"{amount(plan.requested_samples, 'samples')} ({text})"


def amount(work: float, unit: str) -> str:
    """Return tokens or samples in words, as `10 B tokens`."""
    return f"{abbreviated(work, gap=' ')} {unit}"


def _answers(plan: Plan) -> Iterator[str]:
    yield from plan.doubts
    for part in plan.by_task:
        yield from _task_answers(part)
    if plan.search is not None and plan.search.front:
        yield f"Best layout that was searched: {_layout_text(plan.search.front[0], plan.rows[0])}."
    if plan.fewest is not None:
        needed = _gib(plan.fewest.device_bytes / 2**30)
        yield f"Fewest: {plan.fewest.change}, with {plan.fewest.strategy} in {needed} GiB."


def _task_answers(plan: Plan) -> Iterator[str]:
    if plan.best:
        if not any(row.fit == "yes" for row in plan.rows):
            yield "Tight: the tensors fit, but not with the usual context and fragmentation."
        fastest, _, cheapest = plan.best
        row = fastest.row
        figure = _speed_text(row) + (f"; {_memory_text(row)}" if len(plan.rows) == 1 else "")
        if row.hours_for(plan.work) is not None and row.price_per_hour is not None:
            figure += f"; {_cost_text(row, plan)}"
        answers = [_brief_text(fastest, figure)]
        if cheapest.row is not row:
            answers.append(_brief_text(cheapest, _cost_text(cheapest.row, plan)))
        yield from answers if len({row.on for row in plan.rows}) == 1 else reversed(answers)
    elif any(row.fits for row in plan.rows) or all(row.fits is None for row in plan.rows):
        task = ", ".join(as_text(value) for row in plan.rows[:1] for value in row.task.values())
        subject = "No speed" if any(row.fits for row in plan.rows) else "Nothing"
        reasons = dict.fromkeys(row.reason for row in plan.rows if row.reason is not None)
        reasons_text = f": {next(iter(reasons))}" if len(reasons) == 1 else "; each reason is below"
        yield f"{subject}{f' of {task}' if task else ''} could be predicted{reasons_text}."
    elif plan.search is not None and plan.search.front:
        yield "None of the experiment's strategies fits."
    else:
        sized = (row for row in plan.rows if row.device_bytes is not None)
        # A lower bound may be exceeded by more than any traced size.
        least = min(
            sized, key=lambda row: (row.at_least, (row.device_bytes or 0.0) / row.card_bytes)
        )
        hint = "; --search compares more layouts" if not (plan.search or least.on) else ""
        needs = f"{'more than ' * least.at_least}{_memory_text(least)}"
        if least.card_fit != "no":  # the host is too small
            host_gib = (least.host_bytes / 2**30, (least.host_room_bytes or 0.0) / 2**30)
            needs += " and {:,.0f} of {:,.0f} GiB of each node".format(*host_gib)
        yield f"Nothing fits: {least.place} needs least, {needs}{hint}."


def _layout_text(layout: Candidate, row: Prediction) -> str:
    """Return, for example, `fsdp-tp (data 4, tensor 2), 9,500 tokens/s, 123 ms a step in 9 GiB`."""
    sizes = layout.mesh.model_dump()
    parts = ", ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
    parts_text = [f"{layout.strategy} ({parts})" if parts else layout.strategy]
    parts_text += ["recomputing activations"] if layout.activation_checkpointing else []
    parts_text += ["offloading"] if layout.cpu_offload else []
    needed = _gib(layout.device_bytes / 2**30)
    parts_text += [
        f"{abbreviated(layout.samples_per_second * (row.tokens_per_sample or 1))} {row.unit}/s"
    ]
    return (
        f"{', '.join(parts_text)}, {number(1000 * layout.step_seconds)} ms a step in {needed} GiB"
    )


def _range_note(plan: Plan) -> str:
    if plan.anchored is not None:
        return f"In brackets: 90 % interval. Predicted from {plan.anchored}."
    software = SOFTWARE[plan.stack] if plan.unit == "tokens" else "on other machines"
    if any(row.host_bytes for row in plan.rows):
        software += "; offloaded rows have the range of four runs"
    return (
        f"In brackets: 90 % interval without a measurement, of published runs {software};"
        " --measured SPEED narrows it."
    )


def _last_notes(plan: Plan) -> list[str]:
    return [*_refusals(plan), *plan.notes]


def _refusals(plan: Plan) -> Iterator[str]:
    """Yield each reason once, with the strategies and ranks for which it holds."""
    refused = gathered(
        (row.reason, row) for row in plan.rows if row.reason not in {None, TOO_LARGE}
    )
    for reason, rows in refused.items():
        labels = grouped((row.label, str(row.ranks)) for row in rows)
        places = gathered((", ".join(ranks), label) for label, ranks in labels.items())
        places_text = "; ".join(f"{', '.join(names)} on {ranks}" for ranks, names in places.items())
        yield f"Not predicted: {places_text} ranks: {reason}"


def answer_table(plan: Plan, *, best_of_each: bool = False) -> Table:
    """Return the table of a question: fit, memory, speed, time and cost of each strategy."""
    predicted = [row for row in plan.rows if row.memory is not None or row.time is not None]
    rows = _best_of_machines(plan, predicted) if best_of_each else _chosen(predicted)
    work = "the recipe" if plan.work is None else work_text(plan)
    if plan.requested_work is None and plan.work is not None and plan.assumed is None:
        work += f", since the recipe's steps train unequal numbers of {plan.unit}"
    sizes = [*dict.fromkeys(_gib(row.card_bytes / 2**30) for row in rows)] or [""]
    prices = {f"{row.price_per_hour:g}": None for row in rows if row.price_per_hour is not None}
    at = f", each card at {listed([*prices])} dollars an hour" if prices else ""
    has_speed = any(row.time is not None for row in rows)
    spent = f"hours, dollars: for {work}{at}.  " if has_speed else ""
    notes = [f"{spent}GiB: of the card's {listed(sizes)}."]
    if any(row.fit == "tight" for row in rows):
        notes[0] += "  tight: fits only if less than usual is lost to fragmentation."
    if not best_of_each and len(rows) < len(predicted):
        same = [
            f"{title_of(key).rpartition('.')[2]} {values[0]}"
            for key, values in _axes(rows).items()
            if len(values) == 1
        ]
        notes.append(
            f"The best of each strategy in {len(predicted)} rows: --memory and --speed have all."
            f"{f' Here: {listed(same)}.' if same else ''}"
        )
    notes += [] if plan.assumed is None else [f"Assumed: {plan.assumed}."]
    useful = min((row.useful_fraction for row in rows), default=1.0)
    if useful < 1:
        notes.append(
            f"Padding: {number(100 * (1 - useful))} % of the tokens; speed, hours and dollars are"
            f" those of the others.  Packed samples train {number(1 / useful)} times as many in a"
            " second."
        )
    notes += [*([_range_note(plan)] if has_speed else []), *_untraced_notes(rows)]
    notes += _deviation_notes(rows)
    title = _title(plan, rows)
    columns = [*_names(rows), *_answer_columns(plan)]
    # Machines or numbers of ranks leave no room for the last column.
    if best_of_each or (plan.assumed is not None and len({row.ranks for row in rows}) > 1):
        columns = columns[:-1]
    return table_of(title, rows, columns, notes)


def _best_of_machines(plan: Plan, rows: Sequence[Prediction]) -> list[Prediction]:
    """Return the cheapest row of each kind of machine, which the answer names, too."""
    machines = gathered((row.on, row) for row in _chosen(rows))
    parts = (replace(plan, rows=tuple(of_machine)) for of_machine in machines.values())
    return [part.best[-1].row if part.best else part.rows[0] for part in parts]


def _chosen(rows: Sequence[Prediction]) -> list[Prediction]:
    """Return the rows of the table, in its order.

    Several machines are ordered by cost, strategies of one size by fit and speed.  Of many cells,
    only the best of each strategy is chosen.
    """
    order = ("yes", "tight", "no", None)
    machines = {row.on for row in rows}
    by_cost = len(machines) > 1

    def rank(row: Prediction) -> tuple[float, float]:
        if by_cost:
            return not row.fits, MINIMISED["cost"](row) if row.time else inf
        return order.index(row.fit), -row.work_per_second

    folds = len(rows) > MOST_ROWS and any(len(values) > 1 for values in _axes(rows).values())
    one_size = len({row.ranks for row in rows}) == 1
    if not (by_cost or folds or one_size):
        return [*rows]
    chosen: dict[object, Prediction] = {}
    for row in sorted(rows, key=rank):
        place = (row.label, row.ranks, row.on, as_text(row.task)) if folds else id(row)
        chosen.setdefault(place, row)
    return [*chosen.values()]


def _answer_columns(plan: Plan) -> Columns[Prediction]:
    work = plan.work

    def rate(row: Prediction) -> Value:
        if row.time is None or row.low_seconds is None or row.high_seconds is None:
            return Missing(row.reason or "")
        ends = (abbreviated(row.step_work / end) for end in (row.high_seconds, row.low_seconds))
        return f"{abbreviated(row.work_per_second)} ({'-'.join(ends)})"

    return [
        (Column("fits", numeric=False), _attribute("fit")),
        (Column("device_bytes", "GiB", scale=1 / 2**30, digits=3), _size),
        (Column("rate", f"{plan.unit}/s (range)"), rate),
        (Column("hours", digits=2), lambda row: row.hours_for(work)),
        (Column("dollars", digits=2), lambda row: row.dollars_for(work)),
        (Column("bound", "bound by", numeric=False), lambda row: row.time and row.time.bound),
    ]


def _size(row: Prediction | Remedy) -> Value:
    """Return the bytes of a card, or `>17.5` GiB of what no step was traced for."""
    if row.at_least and row.device_bytes is not None:
        return f">{_gib(row.device_bytes / 2**30)}"
    return row.device_bytes


def _untraced_notes(rows: Sequence[Prediction | Remedy]) -> list[str]:
    text = ">: without activations, as it does not fit even so."
    return [text] if any(row.at_least for row in rows) else []


def _deviation_notes(rows: Sequence[Prediction]) -> Iterator[str]:
    """Yield the deviations from the training of one device, each with its strategies."""
    names = grouped((deviation, row.strategy) for row in rows for deviation in row.own_mathematics)
    for deviation, strategies in names.items():
        yield f"{', '.join(strategies)}: {deviation}."


def remedies_table(plan: Plan) -> Table:
    """Return the table of changes that save memory, for an experiment that does not fit."""
    columns: Columns[Remedy] = [
        (Column("change", numeric=False, names_row=True), attrgetter("change")),
        (Column("strategy", numeric=False), attrgetter("strategy")),
        (Column("device_bytes", "GiB", scale=1 / 2**30, digits=3), _size),
        (Column("fits", numeric=False), attrgetter("fit")),
    ]
    settings = dict.fromkeys(remedy.setting for remedy in plan.remedies if remedy.setting)
    notes = [f"Options, by row: {'; '.join(settings)}."] if settings else []
    notes += _untraced_notes(plan.remedies)
    if host_gib := max((remedy.host_bytes for remedy in plan.remedies), default=0) / 2**30:
        notes.append(f"Offloaded state takes {host_gib:,.0f} GiB of each node's own memory.")
    fits = any(remedy.fit == "yes" for remedy in plan.remedies)
    title = "What would make it fit" if fits else "What saves memory, but is not enough"
    if _fails(plan):
        title += f": {_title(plan, plan.rows)}"
        notes += [] if plan.assumed is None else [f"Assumed: {plan.assumed}."]
    elif plan.remedies and plan.rows[0].on is not None:
        title += f" on {plan.rows[0].on}"
    return table_of(title, plan.remedies, columns, notes)


def _title(plan: Plan, rows: Sequence[Prediction]) -> str:
    """Return the model with its size, the machines and the precision."""
    count = next((row.parameters for row in rows if row.parameters), None)
    active = next((row.active_parameters for row in rows if row.active_parameters), None)
    size_text = "" if count is None else f" ({abbreviated(count, gap=' ')} parameters"
    size_text += "" if active is None else f", {abbreviated(active, gap=' ')} for a token"
    size_text += "" if count is None else ")"
    precision = "" if plan.precision is None else f", {plan.precision}"
    return f"{plan.experiment}{size_text} on {plan.on}{precision}"


def speed_table(plan: Plan) -> Table:
    rows = [row for row in plan.rows if row.time is not None]
    notes = [_range_note(plan), "Naive: each GPU keeps its throughput on the fewest GPUs."]
    if plan.work is not None:
        notes.append(f"Time and dollars are for {work_text(plan)}.")
    return table_of(f"Speed on {plan.on}", rows, [*_names(rows), *_speed(plan)], notes)


def memory_table(plan: Plan) -> Table:
    rows = [row for row in plan.rows if row.memory is not None and not row.at_least]
    notes = [
        "Of the card: memory of the peak's tensors with fragmentation, context and libraries."
        " Largest batch: samples of a rank in one pass."
    ]
    return table_of("Memory of a rank at its peak", rows, [*_names(rows), *_memory(rows)], notes)


def search_tables(plan: Plan) -> list[Table]:
    """Return the table of the best layouts, the fastest first."""
    if (search := plan.search) is None:
        return []
    row = plan.rows[0]
    sizes_of = attrgetter("data", "shard", "tensor", "pipeline")
    columns: Columns[Candidate] = [
        (Column("strategy", numeric=False, names_row=True), _searched),
        (
            Column("mesh", "data/shard/tensor/stages", numeric=False, names_row=True),
            lambda layout: "/".join(map(str, sizes_of(layout.mesh))),
        ),
        (Column("micro_batch", "micro-batch"), attrgetter("micro_batch")),
        (Column("activation_checkpointing", "recomputes"), attrgetter("activation_checkpointing")),
        (Column("cpu_offload", "offloads"), attrgetter("cpu_offload")),
        (metric_column("step_seconds", estimated=False), attrgetter("step_seconds")),
        (
            Column(f"{row.unit}_per_second", f"{row.unit}/s"),
            lambda layout: layout.samples_per_second * (row.tokens_per_sample or 1),
        ),
        (Column("device_bytes", "memory", unit=BYTES), attrgetter("device_bytes")),
    ]
    notes = [
        f"{search.searched} layouts of FSDP, tensor ranks and stages were compared in"
        f" {search.seconds:.2f} s. Shown is the fastest, and what is slower in a tenth less memory."
        " Times have no interval: measure the few that you would use."
    ]
    title = f"Best layouts of {search.ranks} ranks on {counted(search.nodes, 'node')} of {plan.on}"
    return [table_of(title, search.front, columns, notes)]


def _searched(layout: Candidate) -> str:
    """Return, for example, `fsdp-hybrid (reshard_after_forward=false)`; others have columns."""
    flags = {name: value for name, value in layout.options.items() if isinstance(value, bool)}
    return with_options(layout.strategy, flags)


def _search_json(plan: Plan, search: Search) -> dict[str, Any]:
    front = [
        asdict(layout)
        | {
            "mesh": layout.mesh.model_dump(),
            "options": {
                name: value.model_dump() if isinstance(value, Mesh) else value
                for name, value in layout.options.items()
            },
        }
        for layout in search.front
    ]
    return {
        "ranks": search.ranks,
        "nodes": search.nodes,
        "searched": search.searched,
        "front": front,
        "winner": None if plan.winner is None else plan.winner.model_dump(mode="json"),
    }


def _names(rows: Sequence[Prediction]) -> Columns[Prediction]:
    """Return the columns that tell rows apart, for people."""

    def axis(key: str) -> tuple[Column, Callable[[Prediction], Value]]:
        title = title_of(key).rpartition(".")[2]
        column = Column(f"varied.{key}", title, names_row=True, shown_to="people")
        return column, lambda row: as_text(row.varied.get(key))

    ranks = Column("ranks_of", "ranks", names_row=True, shown_to="people")
    has_sizes = len({row.ranks for row in rows}) > len({row.on for row in rows})
    by_ranks = [(ranks, attrgetter("ranks"))] if has_sizes else []
    axes = [key for key, values in _axes(rows).items() if len(values) > 1]
    machines = Column("on", "machines", numeric=False, names_row=True, shown_to="people")
    on = [(machines, attrgetter("on"))] if any(row.on for row in rows) else []
    return [strategy_column(rows), *by_ranks, *on, *map(axis, axes)]


def _axes(rows: Sequence[Prediction]) -> dict[str, list[str]]:
    """Return the different values of each varied key, as text."""
    return grouped((key, as_text(value)) for row in rows for key, value in row.varied.items())


def _speed(plan: Plan) -> Columns[Prediction]:
    unit, work = plan.unit, plan.work

    def rate(row: Prediction) -> Value:
        return _estimate(row, lambda seconds: row.step_work / seconds)

    def naive(row: Prediction) -> Value:
        rate = row.naive_samples_per_second
        return Missing(row.reason or "") if rate is None else rate * (row.tokens_per_sample or 1)

    def time_taken(row: Prediction) -> str | None:
        hours = row.hours_for(work)
        return None if hours is None else duration(hours * HOUR_SECONDS)

    def dollars(row: Prediction) -> Value:
        if row.price_per_hour is None:
            return Missing(row.reason or "no price was given: --price-per-hour")
        return _value_or_reason(row, row.dollars_for(work))

    takes = "recipe takes" if work is None else f"{amount(work, unit)} take"
    return [
        (metric_column("step_seconds"), lambda row: _estimate(row, lambda seconds: seconds)),
        (metric_column(f"{unit}_per_second", interval="to"), rate),
        (Column(f"naive_{unit}_per_second", "naive"), naive),
        (Column("bound", "bound by", numeric=False), _attribute("time.bound")),
        (Column("recipe", takes, shown_to="people"), time_taken),
        (Column("cost", "dollars", digits=2, shown_to="people"), dollars),
        (for_programs("hours"), lambda row: _value_or_reason(row, row.hours_for(work))),
        (for_programs("dollars"), dollars),
        (for_programs(f"trained_{unit}"), lambda row: _value_or_reason(row, work or row.work)),
    ]


def _estimate(row: Prediction, value_of_seconds: Any) -> Value:
    if row.time is None or row.low_seconds is None or row.high_seconds is None:
        return Missing(row.reason or "")
    ends = sorted((value_of_seconds(row.low_seconds), value_of_seconds(row.high_seconds)))
    return Estimate(value=value_of_seconds(row.time.seconds), low=ends[0], high=ends[1], n=0)


def _value_or_reason(row: Prediction, value: Value) -> Value:
    return Missing(row.reason or "not known") if value is None else value


def _attribute(path: str) -> Callable[[Prediction], Value]:
    """Return a column's function: the attribute, or the reason why there is none."""

    def value_of(row: Prediction) -> Value:
        value: Any = row
        for name in path.split("."):
            value = value and getattr(value, name)
        return _value_or_reason(row, value)

    return value_of


def _memory(rows: Sequence[Prediction]) -> Columns[Prediction]:
    offloaded = any(row.memory is not None and row.memory.on_host for row in rows)

    def share(row: Prediction) -> Value:
        needed = row.device_bytes
        return _value_or_reason(row, None if needed is None else needed / row.card_bytes)

    return [
        (Column("peak_memory_bytes", "peak", unit=BYTES), _attribute("memory.peak_bytes")),
        (Column("card_share", "of the card", unit="%", scale=100, decimals=0), share),
        (Column("fits", numeric=False), _attribute("fit")),
        (Column("largest_batch", "largest batch"), _attribute("largest_batch")),
        *(
            (
                Column(f"{field.name}_bytes", field.name.replace("_", " "), unit=BYTES),
                _attribute(f"memory.{field.name}"),
            )
            for field in fields(RankMemory)
            if field.name != "on_host" or offloaded
        ),
    ]


def _for_programs() -> Columns[Prediction]:
    reasoned = ("device_bytes", "parameters", "steps")
    present = ("card_bytes", "active_parameters", "useful_fraction", "at_least", "reason")

    def parts(row: Prediction) -> Value:
        return _value_or_reason(row, None if row.time is None else asdict(row.time))

    return [
        *((for_programs(name), _attribute(name)) for name in reasoned),
        (for_programs("seconds_by_part"), parts),
        *((for_programs(name), attrgetter(name)) for name in present),
    ]
