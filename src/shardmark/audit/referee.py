"""Does script B train what script A trains?  B takes A's steps, and both are compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from shardmark.audit import causes, differences
from shardmark.audit.audit import UNCOMPILED, AuditReport, Runs, refusal_of, size_of
from shardmark.audit.causes import Finding
from shardmark.audit.comparison import Records, first_gradient_checks, later_checks, update_check
from shardmark.base.errors import InputError
from shardmark.base.evidence.checks import Check
from shardmark.base.text import counted
from shardmark.scripts.launch import launch, read_records
from shardmark.scripts.record import Record
from shardmark.scripts.start import Started

GUIDED = "shardmark.audit.guided:GuidedObserver"
"""Observer of a start that gets another script's weights, batches and draws."""
COARSE = 1e-4
"""Rounding error of a forward pass that hides small differences."""
METHOD = "B took A's steps: the same weights, batches and random numbers"


@dataclass(kw_only=True)
class Match:
    """Two scripts, and the starts that their comparison needs."""

    a: Runs
    b: Runs
    notes: list[str] = field(default_factory=list)

    def guided(self, runs: Runs, name: str, **changes: object) -> list[Record] | None:
        """Start a script with A's weights, batches and draws; None if it does not run with them."""
        facts = {"recorded": self.a.recording.directory, "observer": GUIDED, "guided": True}
        try:
            return self.start(runs, name, **facts | changes)
        except InputError as error:
            self.notes.append(f"with A's batches, {'; '.join(error.args[1:3])}")
            return None

    def start(self, runs: Runs, name: str, **changes: object) -> list[Record]:
        """Start a script once more, with changes of its plan."""
        directory = str(Path(self.a.recording.directory).parent / name)
        plan = replace(runs.recording, **changes, directory=directory)  # type: ignore[arg-type]
        started = launch(runs.start, runs.command, runs.ranks, plan)
        return read_records(
            started, plan, ranks=runs.ranks, seconds=runs.seconds, place=runs.place
        )[0]


def judge_scripts(a: Runs, b: Runs, started: Sequence[Started]) -> AuditReport:
    """Compare B with A, whose starts are recording.  Raises `InputError` if one does not run."""
    b = replace(b, against=a.command.text)
    of_a, of_b = a.record(started[0]), b.record(started[1])
    for which, records in (("A", of_a), ("B", of_b)):
        refusal = refusal_of(records)
        if not refusal and any(record.flat_slices for record in records):
            refusal = "FSDP1 joins parameters to flat ones, which have no counterpart"
        if not refusal and any(records[0].parts):
            refusal = "its optimizers step after backward passes of their own, as those of a GAN"
        if refusal:
            return b.untold(f"{which}: {refusal}", of_b, method=METHOD)
    if "compile" in b.recording.interventions and not all(record.graphs for record in of_b):
        return b.untold("torch.compile made no graph of its model", of_b, method=METHOD)
    match = Match(a=a, b=b)
    scripts = _scripts(match, of_a, of_b)
    all_differences = differences.differences(scripts)
    checks = _checks(scripts)
    if not all(check.holds for check in checks):
        a.progress("A takes its steps again, with weights that differ by a rounding")
        pairs = {name: name for name in of_a[0].names}
        disturbed = match.guided(a, "disturbed", perturbed=True, pairs=pairs)
        if disturbed is not None:
            shaken = differences.baseline(disturbed, of_b[0].names, scripts.pairs)
            scripts = replace(scripts, records=replace(scripts.records, disturbed=shaken))
            checks = _checks(scripts)
    return _judged(match, scripts, all_differences, checks)


def _scripts(match: Match, of_a: list[Record], of_b: list[Record]) -> differences.Scripts:
    """Start what the comparison needs beside the first starts, and join all records."""
    pairs = differences.pairs_of(of_a[0], of_b[0])
    steps = min(len(record.steps) for record in (*of_a, *of_b))
    reference = differences.baseline(of_a, of_b[0].names, pairs)
    start_differs = bool(differences.same_start(reference, of_b[0]))
    rows_differ = not differences.same_rows(of_a, of_b, steps=steps)
    again = guided = None
    if start_differs or rows_differ:
        match.a.progress("A once more, to see what repeats itself")
        again = match.start(match.a, "again")
    if start_differs or rows_differ or not differences.same_draws(of_a, of_b):
        match.b.progress("B takes A's steps")
        shape = _shape(of_a, of_b)
        if shape is None:
            match.notes.append("the micro-batches of A cannot be divided among B's")
        else:
            guided = match.guided(match.b, "guided", pairs=pairs, **shape)
    b = guided or of_b
    records = Records(ranks=b, replay=reference)
    records = replace(records, local_steps=bool(records.different_gradients))
    return differences.Scripts(a=of_a, alone=of_b, b=b, again=again, pairs=pairs, records=records)


def _shape(of_a: Sequence[Record], of_b: Sequence[Record]) -> dict[str, int | bool] | None:
    """Return the changes of a plan that make B's micro-batches of A's; None if none can."""
    a, b = (len(ranks[0].steps[0].micros) for ranks in (of_a, of_b))
    if not a or not b:
        return {}
    if len(of_b) < len(of_a) and b == a * (len(of_a) // len(of_b)) and b > a:
        return {"interleaved": True}
    if len(of_a) < len(of_b) and a == b * (len(of_b) // len(of_a)) and a > b:
        return {"merged": a // b}
    if max(a, b) % min(a, b):
        return None
    return {"merged": max(1, a // b), "divided": max(1, b // a)}


def _checks(scripts: differences.Scripts) -> list[Check]:
    """Compare the stages of the first steps; later ones where the earlier ones are alike."""
    records, reference = scripts.records, scripts.records.one_process
    if not scripts.follows:
        return []
    checks = first_gradient_checks(records, reference)
    rates = [r.steps[0].rates for r in (records.ranks[0], reference)]
    if checks[-1].holds:
        if any(rates[0] or [1.0]) or any(rates[1] or [1.0]):
            checks.append(update_check(records, reference))
        if checks[-1].holds and differences.same_rows(scripts.a, scripts.b, steps=scripts.steps):
            checks += later_checks(records, reference)
            if all(check.holds for check in checks) and scripts.steps > 1:
                checks.append(update_check(records, reference, steps=scripts.steps))
    return checks


STAGE_OF_CHECK = {
    "gradient before clipping": differences.GRADIENT,
    "gradient, step 1": differences.CLIPPING,
    "first update": differences.UPDATE,
}


def _judged(
    match: Match, scripts: differences.Scripts, seen: list[Finding], checks: list[Check]
) -> AuditReport:
    failing = next((check for check in checks if not check.holds), None)
    stage = STAGE_OF_CHECK.get(failing.name if failing else "", differences.LATER_STEPS)
    explaining = [d for d in seen if differences.stage_of(d) in range(stage + 1)]
    ordered = [*explaining, *(d for d in seen if d not in explaining)]
    deviation = ""
    if failing is not None:
        step = failing.name.partition("step ")[2]
        quantity = failing.name if "update" in failing.name else "gradient"
        deviation = f"its {quantity}".replace("its updates", "the sum of its updates")
        deviation += f" is off by {size_of(failing)}" + (f" in step {step}" if step else "")
    findings = [
        replace(difference, deviation=deviation if difference in explaining[:1] else "")
        if difference in explaining or failing is None
        else replace(difference, evidence=f"{difference.reason}: {difference.evidence}")
        for difference in ordered
    ]
    follows = bool(checks)
    sides = f"{_side(match.b, scripts.b)} against {_side(match.a, scripts.a)}"
    if deviation and explaining:
        answer = f"B does not train what A trains: {deviation}, because {ordered[0].reason}"
    elif failing is not None and not seen and (draws := scripts.b[0].unmatched):
        hint = "" if match.b.recording.deterministic else "; audit it with --deterministic"
        reason = f"B cannot repeat A's random numbers ({draws[0]}){hint}"
        return match.b.untold(reason, scripts.b, method=METHOD)
    elif failing is not None:
        place = f" ({failing.where})" if failing.where else ""
        answer = f"B does not train what A trains: {deviation}{place}; no cause could be shown"
    elif seen:
        by_intent = ", by intent" if {d.name for d in seen} == {"batch"} else ""
        answer = f"B does not train what A trains{by_intent}: {seen[0].reason}"
        first, steps = differences.stage_of(seen[0]), counted(scripts.steps, "step")
        if follows and first not in {differences.TAKEN_AWAY, differences.INPUTS}:
            answer += f"; the first {steps} are equal within the tolerances"
    elif not follows:
        reason = match.notes[0] if match.notes else "its models do not get A's samples"
        return match.b.untold(reason, scripts.b, method=METHOD)
    elif reason := causes.unseen(scripts.records) or match.a.crash or match.b.crash:
        return match.b.untold(reason, scripts.b, method=METHOD)
    else:
        answer = _same(scripts, checks, sides)
    notes = [*match.notes]
    if (place := scripts.a[0].compiled_at) and not scripts.b[0].compiled_at:
        notes.append(f"A: {UNCOMPILED.format(place)}")
    if seen or failing is not None:
        notes.append(f"B is {sides}")
    if not follows:
        notes.append("B's models did not get A's samples: only what was recorded is compared")
    return match.b.report(
        not seen and failing is None, answer, scripts.b, findings=findings, checks=checks,
        method=METHOD, notes=notes,
    )  # fmt: skip


def _same(scripts: differences.Scripts, checks: Sequence[Check], sides: str) -> str:
    """Answer for scripts without a difference, with the limits of the comparison."""
    deviations = [c.found for c in checks if isinstance(c.found, float) and np.isfinite(c.found)]
    largest, steps = max(deviations, default=0.0), counted(scripts.steps, "step")
    answer = f"B trains what A trains ({sides}, {steps}, largest deviation {largest:.1g})"
    if scripts.records.epsilon > COARSE:
        answer += f"; in 16 bits, less than {scripts.records.floor:.1g} would not be seen"
    unrepeated = ["initial weights"] * (not scripts.repeats_start)
    unrepeated += ["samples"] * (not scripts.repeats_samples(0))
    if unrepeated:
        answer += (
            f", from one start of A: each start draws other {' and '.join(unrepeated)}, so "
            "that only their sizes and order are compared; seed A to compare them"
        )
    return answer


def _side(runs: Runs, records: Sequence[Record]) -> str:
    wrapped, graphs = ", ".join(records[0].frameworks or ["torch"]), records[0].graphs
    compiled = f" in {counted(graphs, 'compiled graph')}" if graphs else ""
    return f"{counted(runs.ranks, 'rank')} of {wrapped}{compiled}"
