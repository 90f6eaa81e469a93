"""Runs a script on N ranks and again in one process with the same data, and compares both."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from math import inf
from pathlib import Path
from typing import Any

import numpy as np

from shardmark.audit import causes
from shardmark.audit.causes import Finding, percent
from shardmark.audit.comparison import (
    Records,
    agreement_check,
    aligned,
    first_gradient_checks,
    gradient_check,
    later_checks,
    relative,
    stacked,
    update_check,
)
from shardmark.audit.script import Progress
from shardmark.base.evidence.accepted import ACCEPTABLE, USUAL
from shardmark.base.evidence.captures import BLIND, MARGIN
from shardmark.base.evidence.checks import Check
from shardmark.base.text import counted, listed
from shardmark.scripts.command import ScriptCommand
from shardmark.scripts.launch import Start, launch, read_records
from shardmark.scripts.record import Record, part_of
from shardmark.scripts.recording import GROWN, Plan, rank_file
from shardmark.scripts.start import NO_OUTPUT, Started, described_writes, filled_disk

PORT_TAKEN = "ddress already in use"
VANISHING = 1e-4
"""Norm of a gradient, relative to that of the weights, that may be rounding alone."""

REPLAYS = "shardmark.audit.replay:ReplayObserver"
"""Observer that the hooks call in a replay."""
PLAIN_MEANS = {"uneven_micro_batches", "uneven_weights", "whole_batch_loss"}
"""Causes that are accepted by comparing with the plain mean of the ranks' own gradients."""
NO_REPLAY = "no replay in one process"
REPLAY = "replay: one process trained on the batches of all ranks together"
UNCOMPILED = "what torch.compile makes is not compared ({}): it was switched off"
DIVIDED = "the script divides by one rank's samples: one process's loss is divided by the ranks"
OWN_GRADIENTS = "own gradients: the ranks' own gradients, weighted by their targets"


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditReport:
    """Answer to the question whether N ranks train what one process trains."""

    command: str
    ranks: int
    steps: int
    same: bool | None
    """None if it cannot be told."""
    answer: str
    """The answer in one sentence."""
    findings: tuple[Finding, ...]
    """Causes of the deviation, the first one first; empty if none could be shown."""
    checks: tuple[Check, ...]
    method: str
    frameworks: tuple[str, ...]
    notes: tuple[str, ...]
    writes: str = ""
    """Description of where the script's writes went."""
    against: str = ""
    """Command of the script that this one was compared with; empty for one process."""
    uncompiled: str = ""
    """Line at which `torch.compile` was switched off; empty without one."""
    accepted: tuple[Finding, ...] = ()
    """Causes that were found and that the user accepts; everything else was compared."""

    @property
    def acceptable(self) -> str:
        """Value of `--accept` that would accept all findings; empty if one has to be mended."""
        chosen = [finding for finding in self.accepted if finding.name not in USUAL]
        names = [finding.name for finding in (*chosen, *self.findings)]
        return ",".join(names) if self.findings and set(names) <= set(ACCEPTABLE) else ""


def judge_script(runs: Runs, recording: Started) -> AuditReport:
    """Compare what the ranks record with replays.  Raises `InputError` as `audit_script` does."""
    recorded = runs.record(recording)
    refusal = refusal_of(recorded)
    if refusal:
        return runs.untold(refusal, recorded, method=NO_REPLAY)
    parts = 1 + max(recorded[0].parts, default=0)
    reports: list[AuditReport] = []
    while len(reports) < parts and not any(report.same is False for report in reports):
        part = len(reports)
        of_part = [part_of(record, part) for record in recorded]
        reports.append(_judged(replace(runs, part=part), of_part))
    return _of_all_parts(reports, parts)


def _of_all_parts(reports: Sequence[AuditReport], parts: int) -> AuditReport:
    """Join the reports on the optimizers that step after backward passes of their own."""
    first = min(reports, key=lambda report: [False, None, True].index(report.same))
    if parts == 1:
        return first
    if first.same is not True:
        which = f"the steps are those of optimizer {reports.index(first) + 1} of {parts}"
        return replace(first, notes=(which, *first.notes))
    checks = [
        check.model_copy(update={"name": f"{check.name} (optimizer {number})"})
        for number, report in enumerate(reports, 1)
        for check in report.checks
    ]
    answer = f"{first.answer} (its {parts} optimizers, one by one)"
    notes = dict.fromkeys(note for report in reports for note in report.notes)
    return replace(first, answer=answer, checks=tuple(checks), notes=tuple(notes))


def refusal_of(records: Sequence[Record]) -> str:
    """Reason why nothing can be compared with these ranks; empty if something can."""
    refusal = next((record.refusal for record in records if record.refusal), "")
    if not refusal and any(record.names != records[0].names for record in records):
        return "the ranks train different parameters (pipeline or expert parallel)"
    same_model = all(record.copied == records[0].copied for record in records)
    others = any(record.copied and record.start != records[0].start for record in records)
    if not refusal and same_model and others:
        return "each rank's optimizer has copies of other parameters, as of a ZeRO written by hand"
    return refusal


@dataclass(kw_only=True)
class Runs:
    """Starts of one script, each in a folder of its own."""

    command: ScriptCommand
    ranks: int
    recording: Plan
    """Plan of the start whose records are replayed."""
    start: Start
    seconds: float
    """Time limit of each start."""
    accept: Collection[str]
    progress: Progress
    against: str = ""
    """Command of the script that this one is compared with; empty for one process."""
    accepted: dict[str, Finding] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    crash: str = ""
    part: int = 0
    """Part of the script's optimizers whose steps are compared."""
    replayed: dict[str, Record | None] = field(default_factory=dict)
    """Replays by folder: one serves all parts."""
    grows: bool = True
    """True until a replay fails with the samples that all ranks drew."""
    _on_gpu: bool = False

    @property
    def place(self) -> str:
        """Place of errors of the script."""
        return f"command {self.command.text!r}"

    def accepts(self, finding: Finding) -> bool:
        """Note a cause that the user accepts; False for others."""
        if finding.name in self.accept:
            self.accepted.setdefault(finding.name, finding)
        return finding.name in self.accept

    def record(self, started: Started) -> list[Record]:
        """Wait for the start that records, and return the records of its ranks."""
        records, self.crash = read_records(
            started, self.recording, ranks=self.ranks, seconds=self.seconds, place=self.place
        )
        self._on_gpu = any(record.on_gpu for record in records)
        return records

    def replays(self, plans: Sequence[Plan]) -> list[Record | None]:
        """Replay in one process for each plan that was not replayed yet."""
        new = [plan for plan in plans if plan.directory not in self.replayed]
        if new:
            self.replayed.update(zip([p.directory for p in new], self._replay(new), strict=True))
        records = [self.replayed[plan.directory] for plan in plans]
        views = [None if record is None else part_of(record, self.part) for record in records]
        if any(view is not None and not view.steps for view in views):
            self.failures.append("takes steps with fewer optimizers")
        return [view if view is not None and view.steps else None for view in views]

    def _replay(self, plans: Sequence[Plan]) -> list[Record | None]:
        """Replay for each plan: side by side, or one by one on a GPU's memory."""
        names = ", ".join(Path(plan.directory).name.replace("-", " ") for plan in plans)
        self.progress(f"one process repeats the steps ({names})")
        records: list[Record | None] = []
        again: dict[int, Plan] = {}
        start = partial(launch, self.start, self.command, 1)
        started = [] if self._on_gpu else [start(plan) for plan in plans]
        try:
            for number, plan in enumerate(plans):
                run = start(plan) if self._on_gpu else started[number]
                code = run.wait(self.seconds)
                path = rank_file(plan.directory, 0)
                record = Record.load(path) if path.is_file() else None
                usable = record is not None and bool(record.steps) and record.ranks == 1
                log = run.log.read_text(errors="replace")
                if not usable and len(plans) > 1 and PORT_TAKEN in log:
                    # The replays used one port at the same time.
                    again[number] = replace(plan, directory=f"{plan.directory}-alone")
                elif not usable and code and (Path(plan.directory) / GROWN).is_file():
                    self.grows = False
                    alone = f"{plan.directory}-ungrown"
                    again[number] = replace(plan, grows=False, directory=alone)
                elif not usable:
                    failure = f"ends with {run.error()}"
                    if filled_disk(Path(plan.directory)):
                        failure = "fills the disk of TMPDIR"
                    elif record is not None and record.ranks > 1:
                        failure = f"starts {record.ranks} ranks"
                    elif code is None:
                        failure = f"does not take {plan.steps} steps in {self.seconds:g} s"
                    elif run.error() == NO_OUTPUT:
                        failure = f"ends with exit code {code} and {NO_OUTPUT}"
                    self.failures.append(failure)
                records.append(record if usable else None)
        finally:
            for run in started[len(records) :]:  # after Ctrl-C
                run.end()
        for number, plan in again.items():
            (records[number],) = self._replay([plan])
        return records

    def in_two_orders(self, name: str, **changes: Any) -> list[Record | None]:
        """Replay with the ranks in their order, and backwards."""
        backwards = self.plan(f"{name}-disturbed", order=(*reversed(range(self.ranks)),), **changes)
        return self.replays([self.plan(name, **changes), backwards])

    @cached_property
    def with_shares(self) -> Record | None:
        """A replay whose batch norm uses the statistics of each rank's rows; None if it fails."""
        (record,) = self.replays([self.plan("shares", batch_norm="shares")])
        return record

    def alone(self, *ranks: int, without: tuple[str, ...] = ()) -> Record | None:
        """Return a replay of these ranks' samples, without some terms; None if it fails."""
        name = "-".join(["alone", *map(str, ranks), *(f"no{number}" for number in without)])
        changes = {"divided_terms": without, "divisor": inf} if without else {}
        return self.replays([self.plan(name, order=ranks, **changes)])[0]

    def effect_of_rounding(self, records: Records, replay: Record) -> float:
        """Relative change of the replay's gradient by one rounding of the weights; 0 if unknown."""
        batch_norm = "shares" if "batch_norm_of_share" in self.accepted else "batch"
        changes = {"perturbed": True, "batch_norm": batch_norm}
        (other,) = self.replays([self.plan(f"perturbed-{batch_norm}", **changes)])
        if other is None:
            return 0.0
        return relative(*aligned(records.replayed(other), records.replayed(replay)))

    def plan(self, name: str, **changes: Any) -> Plan:
        recorded, order = self.recording.directory, tuple(range(self.ranks))
        facts: dict[str, Any] = {"order": order, "recorded": recorded, "observer": REPLAYS}
        name += "-divided" * bool(self.recording.divided_terms)
        facts |= {"grows": self.grows, "directory": str(Path(recorded).parent / name), **changes}
        return replace(self.recording, **facts)

    def report(
        self,
        same: bool | None,
        answer: str,
        recorded: Sequence[Record],
        *,
        findings: Sequence[Finding] = (),
        checks: Sequence[Check] = (),
        method: str = REPLAY,
        notes: Sequence[str] = (),
    ) -> AuditReport:
        return AuditReport(
            command=self.command.text, ranks=self.ranks,
            steps=min(len(record.steps) for record in recorded), same=same,
            answer=f"{self.ranks} ranks: {answer}" if same is None and not self.against else answer,
            against=self.against, findings=tuple(findings), accepted=tuple(self.accepted.values()),
            checks=tuple(checks), method=method,
            frameworks=tuple(recorded[0].frameworks or ["torch"]),
            uncompiled=(uncompiled := recorded[0].compiled_at),
            notes=(*notes, *([UNCOMPILED.format(uncompiled)] if uncompiled else [])),
            writes=described_writes(Path(self.recording.directory)),
        )  # fmt: skip

    def untold(self, reason: str, recorded: Sequence[Record], **more: Any) -> AuditReport:
        """Report that it cannot be told, and why."""
        return self.report(None, f"cannot be told: {reason}", recorded, **more)


def _judged(runs: Runs, recorded: list[Record]) -> AuditReport:
    replay, disturbed = runs.in_two_orders("replay")
    records = Records(
        ranks=recorded, replay=replay, disturbed=disturbed, with_shares=lambda: runs.with_shares,
        alone=runs.alone, after_updates=runs.part > 0,
    )  # fmt: skip
    micros = len(recorded[0].steps[0].micros)
    times = replay is not None and micros and len(replay.steps[0].micros) == micros * runs.ranks
    if times and not records.matched:  # one process takes as many micro-batches as all ranks
        replay, disturbed = runs.in_two_orders("interleaved", interleaved=True)
        records = replace(records, replay=replay, disturbed=disturbed)
    if replay is not None and records.matched and _order_matters(records, replay):
        for sections in (2, 3):
            again, disturbed = runs.in_two_orders(f"sections-{sections}", sections=sections)
            tuples = replace(records, replay=again, disturbed=disturbed)
            if again is not None and tuples.matched and not _order_matters(tuples, again):
                records, replay = tuples, again
                runs.recording = replace(runs.recording, sections=sections)
                break
    if records.matched and (terms := causes.means_of_rank(records)):
        runs.recording = replace(runs.recording, divided_terms=terms)
        replay, disturbed = runs.in_two_orders("replay")
        records = replace(records, replay=replay, disturbed=disturbed)
    if records.reduces_in_step:
        records = records.after_reduction()
    weights = causes.of_weights(records)
    local = weights is not None and weights.name == "local_steps" and runs.accepts(weights)
    records = replace(records, local_steps=local)
    if not local and records.different_gradients and "local_steps" in runs.accept:
        return runs.untold(
            f"the ranks use different gradients, and do not make their weights "
            f"equal within {records.steps} steps; record more by --steps N",
            recorded,
        )
    for quantity, vectors in (
        ("the weights at the start are", records.weights_at_start()),
        ("the gradient of step 1 is", records.gradients()),
    ):
        if nonfinite := [name for name, values in vectors.items() if not np.isfinite(values).all()]:
            return runs.untold(f"{quantity} not finite ({listed(nonfinite)})", recorded)
    if replay is not None and replay.resumed_at != recorded[0].resumed_at:
        return runs.untold(
            f"the script resumes: its optimizer has taken "
            f"{counted(recorded[0].resumed_at, 'step')} on the ranks and "
            f"{counted(replay.resumed_at, 'step')} in one process before the first one",
            recorded,
        )
    baseline: Baseline = _against_replay if records.matched else _against_own_gradients
    while not isinstance(answer := baseline(runs, records), AuditReport):
        baseline, records = answer
    return answer


Baseline = Callable[[Runs, Records], "AuditReport | tuple[Baseline, Records]"]
"""Compares the ranks with what is expected of them.  Returns the next baseline, and the records for
it, where a cause was found that the user accepts: the rest is compared without it."""


def _against_replay(runs: Runs, records: Records) -> AuditReport | tuple[Baseline, Records]:
    replay = records.replay
    assert replay is not None, "baselines with a replay have one"

    *before_clipping, gradient = first_gradient_checks(records, replay)
    rate = _rate_check(records, replay)
    by_updates = records.reduces_in_step
    wrong_before = records.off_before_clipping(replay) > records.reduction_tolerance
    seen = replace(records, before_clipping=wrong_before and not by_updates)

    def off_from(other: Record) -> float:
        return relative(*aligned(seen.gradients(), seen.replayed(other)))

    checks = [*_rank_checks(records)]
    checks += [] if by_updates else [*before_clipping, gradient]
    checks += [rate]
    later: list[Check] = []
    comparable = (gradient.holds or by_updates) and not records.local_steps
    if comparable and rate.holds:
        updated = any(records.ranks[0].steps[0].rates or [1.0])  # a warm-up may begin with 0
        checks += [update_check(records, replay)] if updated else []
        if by_updates and records.steps > 1:
            checks += [update_check(records, replay, steps=records.steps)]
        else:
            later = [*later_checks(records, replay)]
    checks += later
    findings = _unaccepted(runs, records, "ranks")
    explained = by_updates or any(finding.explains_gradient for finding in findings)
    deviates = not gradient.holds or seen.before_clipping
    if not explained and (deviates or _order_matters(records, replay)):
        finding = causes.of_gradient(seen)
        buffers = {"buffers_differ"} & {*runs.accepted, *(other.name for other in findings)}
        unclear = buffers or replay.unmatched or _order_matters(records, replay)
        if any(other.name == "buffers_differ" for other in findings) and finding is not None:
            finding = None if finding.name == "uneven_weights" else finding
        if unclear and (finding is None or finding.name == "whole_batch_loss"):
            # The ranks' models differ, or one process has several gradients or other micro-batches.
            finding = next(causes.causes_found("accumulation", records), None)
        sizes = map(stacked, (records.replayed(replay), records.weights_at_start()))
        norm, of_weights = map(np.linalg.norm, sizes)
        if deviates and (finding is None or norm < VANISHING * of_weights):
            spread = runs.effect_of_rounding(seen, replay)
            if MARGIN * spread > off_from(replay):
                return runs.untold(
                    "the gradient of step 1 is a rounding error, as one that "
                    f"vanishes: one rounding of the weights changes it by {percent(spread)}, and "
                    f"that of the ranks differs by {percent(off_from(replay))}",
                    records.ranks,
                    findings=findings,
                    checks=checks,
                )
        rest: list[Finding] = []
        if (finding and finding.name) in {None, "whole_batch_loss"}:  # as batch norm may be
            finding, rest = causes.beside_batch_norm(seen, finding, unclear=bool(unclear))
        if finding is not None and finding.name not in runs.accepted and runs.accepts(finding):
            return _without_accepted(runs, records, finding)
        findings += [cause for cause in rest if cause.name not in runs.accept]
        if finding is None and _own_gradients_show(runs, records, replay):
            return _against_own_gradients, records
        if finding is None and (reason := _cannot_repeat(records, replay)):
            reason += "" if runs.recording.deterministic else "; audit it with --deterministic"
            return runs.untold(reason, records.ranks, findings=findings, checks=checks)
        findings += [finding] if finding is not None else []
    return _after_first_gradient(runs, records, checks, findings, later)


def _after_first_gradient(
    runs: Runs,
    records: Records,
    checks: Sequence[Check],
    findings: list[Finding],
    later: Sequence[Check],
) -> AuditReport | tuple[Baseline, Records]:
    """Look for causes in learning rates and in later steps, and report."""
    replay = records.one_process
    findings += causes.causes_found("rates", records)
    late = next((number for number, check in enumerate(later, 1) if not check.holds), 0)
    if late and not findings and update_check(records, replay, steps=late).holds:
        cause = causes.of_later_step(records, late)
        if cause is not None and runs.accepts(cause):
            return _without_accepted(runs, records, cause)
        findings += [cause] if cause is not None else []
    named = {other.name for other in findings}
    accumulated = _unaccepted(runs, records, "accumulation")
    findings += [cause for cause in accumulated if cause.name not in named]
    if late and not findings and replay.unmatched and _own_gradients_show(runs, records, replay):
        return _against_own_gradients, records
    notes = _notes(records, replay)
    notes += [DIVIDED] * bool(runs.recording.divided_terms)
    unknown = causes.advances_by_ranks(records, replay) and not records.ranks[0].asked_lengths
    if unknown and not findings and all(check.holds for check in checks):
        return runs.untold(
            f"the learning rate's schedule advances {records.count} times with "
            "each optimizer step; that is right if its total is the number of batches of one "
            f"process, and {records.count} times too fast if it is a number of optimizer steps",
            records.ranks,
            checks=checks,
            notes=notes,
        )
    return _reported(runs, records, checks, findings, method=REPLAY, notes=notes)


def _own_gradients_show(runs: Runs, records: Records, replay: Record) -> bool:
    """True if the ranks' own gradients show more than a replay with other buffers or draws."""
    if "buffers_differ" in runs.accepted:  # the forward pass uses them
        return True
    of_shares = records.ranks[0].batch_norm and "batch_norm_of_share" not in runs.accept
    hidden = of_shares or records.divides_rows or records.clipped()
    return bool(replay.unmatched) and not hidden


def _cannot_repeat(records: Records, replay: Record) -> str:
    """Reason why one process may have another gradient without a fault; empty if none is seen."""
    if replay.unmatched and not records.divides_rows:
        return (
            f"the script draws random numbers ({replay.unmatched[0]}) that one process cannot "
            "repeat for all ranks"
        )
    if records.divides_rows and any(records.ranks[0].forward_draws.values()):
        return "the script draws random numbers for parts of rows, which one process computes whole"
    if replay.padded_left:
        return "the model's results may depend on the padding on the left, which is longer there"
    if name := records.unlike_module:
        return (
            f"in one process the module {name} has other results for the same inputs: its buffers "
            "or frozen weights may differ by rank or start, or its random numbers are not torch's"
        )
    if causes.draws_elsewhere(records) or _order_matters(records, replay):
        return (
            "in one process the script draws other random numbers (Python's or numpy's), or the "
            "gradient depends on the order of the samples: it pairs samples, or branches on one"
        )
    return ""


def _without_accepted(runs: Runs, records: Records, finding: Finding) -> tuple[Baseline, Records]:
    """Return one process that does what the user accepts, so that another fault is seen."""
    if finding.name == "batch_norm_of_share":
        backwards = tuple(reversed(range(runs.ranks)))
        (disturbed,) = runs.replays(
            [runs.plan("shares-disturbed", batch_norm="shares", order=backwards)]
        )
        by_shares = replace(records, replay=runs.with_shares, disturbed=disturbed)
        return _against_replay, replace(by_shares, with_shares=lambda: None)
    if finding.name == "precision":
        assert records.replay is not None, "it showed the cause"
        used, _ = aligned(records.gradients(), records.replayed(records.replay))
        return _against_replay, replace(records, accepted_rounding=causes.rounding(used))
    return _against_own_gradients, records


def _order_matters(records: Records, replay: Record) -> bool:
    """True if other random numbers hide errors: the same samples in another order show them."""
    both = aligned(records.replayed(records.disturbed), records.replayed(replay))
    return MARGIN * relative(*both) > BLIND


def _against_own_gradients(runs: Runs, records: Records) -> AuditReport | tuple[Baseline, Records]:
    """Compare with the ranks' own gradients: the script feeds one process other data."""
    plain_mean = bool(runs.accepted.keys() & PLAIN_MEANS)
    records = causes.with_own_means(records)
    expected = causes.estimate(records, plain_mean=plain_mean)
    findings = _unaccepted(runs, records, "ranks")
    checks = list(_rank_checks(records))
    if records.reduces_in_step and not findings:
        return runs.untold(
            "the optimizer reduces the gradients in its step, and one process does "
            "not get the ranks' samples, so that it has no update to compare with",
            records.ranks,
            checks=checks,
            notes=runs.failures[:1],
        )
    unknown = ""
    if expected.gradient and not records.reduces_in_step:
        used = records.clipped() or records.gradients()
        comparable = {name: used[name] for name in used if name in expected.gradient}
        floor = max(records.floor, 1e-5)
        checks.append(gradient_check("gradient, step 1", comparable, expected.gradient, {}, floor))
        if not checks[-1].holds and not any(f.explains_gradient for f in findings):
            finding = causes.of_own_gradients(records, expected.gradient)
            if finding is not None and not plain_mean and runs.accepts(finding):
                return _against_own_gradients, records
            findings += [finding] if finding is not None else []
        unknown = "" if plain_mean else causes.unseen_dependence(records)
        if not plain_mean and not causes.weights_are_known(records):
            unknown = (
                "the weights of the ranks are unknown: the loss is not computed by torch's loss "
                "functions, or by several for unlike numbers of targets on each rank"
            )
        elif not expected.sized:
            unknown = "the loss of one process is unknown, and with it the size of the gradient"
    else:
        unknown = "the ranks' own gradients are not seen"
    missing = "".join(f" ({name} generates them)" for name in records.ranks[0].servers)
    missing, hint = f"one process does not get the ranks' samples{missing}", ""
    if records.matched and (draws := records.one_process.unmatched[:1]):
        missing = f"one process cannot repeat the random numbers of all ranks ({draws[0]})"
        hint = "" if runs.recording.deterministic else "; audit it with --deterministic"
    unknown = unknown and f"{missing}, and {unknown}{hint}"
    if records.replay is None:
        unknown = f"in one process the script {runs.failures[0]}"
    else:
        checks.append(_rate_check(records, records.replay))
        findings += [rates] if (rates := causes.of_rates(records)) is not None else []
    findings += _unaccepted(runs, records, "accumulation")
    if unknown and not findings and all(check.holds for check in checks):
        return runs.untold(unknown, records.ranks, checks=checks, method=OWN_GRADIENTS)
    failures = runs.failures[:1] if records.replay is None else []
    notes = [f"in one process the script {failure}" for failure in failures]
    if not notes and (not records.matched or records.one_process.unmatched):
        notes = [f"{missing}, so that it is no reference"]
    return _reported(runs, records, checks, findings, method=OWN_GRADIENTS, notes=notes)


def _unaccepted(runs: Runs, records: Records, stage: causes.Stage) -> list[Finding]:
    return [cause for cause in causes.causes_found(stage, records) if not runs.accepts(cause)]


def _reported(
    runs: Runs,
    records: Records,
    checks: Sequence[Check],
    findings: Sequence[Finding],
    *,
    method: str,
    notes: Sequence[str],
) -> AuditReport:
    failing = [check for check in checks if not check.holds]
    ranks = f"{runs.ranks} ranks"
    if findings:
        first = findings[0]
        too = "" if failing else causes.CAUSES[first.name].in_one_process
        clause = f"and one process {too}" if too else "do not train what one process trains"
        answer = f"{ranks} {clause}: {first.deviation}, because {first.reason}; {first.remedy}"
    elif failing:
        check = failing[0]
        size = f"off by {size_of(check)}" if check.in_tolerances is not None else size_of(check)
        place = f", {check.where}" if check.where else ""
        answer = (
            f"{ranks} do not train what one process trains ({check.name}: {size}{place}); no cause "
            "could be shown"
        )
    elif reason := causes.unseen(records) or runs.crash:
        return runs.untold(reason, records.ranks, checks=checks, method=method, notes=notes)
    else:
        steps = "the gradient of step 1; updates and later steps are not compared"
        if method == REPLAY:
            steps = _compared_steps(records, checks)
            if records.replay is not None and causes.scales_rates(records, records.replay):
                steps += " at the ranks' learning rates, which follow the number of ranks"
        answer = f"{ranks} train what one process trains, in {steps}"
        for finding in runs.accepted.values():
            if finding.name in USUAL:
                answer += (
                    f", as is usual: {finding.reason} (compared with all samples, "
                    f"{finding.deviation}; --strict makes it count)"
                )
        allowed = [
            f"{finding.deviation}, because {finding.reason}"
            for finding in runs.accepted.values()
            if finding.name not in USUAL
        ]
        if allowed:
            answer += f", apart from what you accept: {'; '.join(allowed)}"
    return runs.report(
        not findings and not failing, answer, records.ranks, findings=findings, checks=checks,
        method=method, notes=notes,
    )  # fmt: skip


def _compared_steps(records: Records, checks: Sequence[Check]) -> str:
    """Steps whose gradients a replay was compared with, as text."""
    names = {check.name for check in checks}
    numbers = [n for n in range(1, records.steps + 1) if f"gradient, step {n}" in names]
    compared = records.steps if records.reduces_in_step else max(numbers, default=1)
    text = counted(compared, "step")
    if compared == records.steps:
        return text
    return f"{text}; later ones are not compared: rounding or random numbers change them"


def size_of(check: Check) -> str:
    """Size of a deviation as text."""
    return percent(check.found) if isinstance(check.found, float) else str(check.found)


def _rank_checks(records: Records) -> Iterator[Check]:
    yield records.samples_check(causes.of_data(records) is None)
    names = [records.ranks[0].names[number] for number in records.unsliced]
    last = counted(records.steps, "step")
    for name, values in (
        ("weights at the start", [rank.before for rank in records.ranks]),
        (f"weights after {last}", [rank.steps[records.steps - 1].after for rank in records.ranks]),
    ):
        if names and not (records.local_steps and last in name):
            by_rank = [[tensors[number] for number in records.unsliced] for tensors in values]
            yield agreement_check(name, by_rank, names)


def _rate_check(records: Records, replay: Record) -> Check:
    step = causes.first_other_rate(records, replay)
    holds = step is None or causes.scales_batch(records, replay) is not False
    rates = [record.steps[step or 0].rates[:4] for record in (*records.ranks, replay)]
    *of_ranks, of_replay = [", ".join(f"{rate:.6g}" for rate in groups) for groups in rates]
    text = " / ".join(dict.fromkeys(of_ranks))
    if holds and step is not None:  # the rate follows the batch
        text = of_replay = f"{text}; {of_replay} in one process with another batch"
    return Check(
        name="learning rate", holds=holds, found=text, expected=of_replay, tolerance=None,
        where=None if step is None else f"step {step + 1}",
    )  # fmt: skip


def _notes(records: Records, replay: Record) -> list[str]:
    notes = []
    losses = [records.loss(rank) for rank in records.ranks]
    single = records.loss(replay)
    micros = {len(record.steps[0].micros) for record in (*records.ranks, replay)}
    if single is not None and None not in losses and len(micros) == 1:
        mean = sum(loss for loss in losses if loss is not None) / records.count
        parts = " of a micro-batch, as backward gets it," if max(micros) > 1 else ""
        notes.append(
            f"loss{parts} of step 1: {mean:.6g} (mean of the ranks), {single:.6g} in one process"
        )
    if unknown := causes.of_unknown_division(records):
        notes.append(unknown)
    if not any(records.ranks[0].steps[0].rates or [1.0]):
        notes.append("the learning rate of step 1 is 0, so that the first update shows nothing")
    if causes.scales_rates(records, replay):
        notes.append(
            "the learning rate depends on the number of ranks, as the batch of all ranks does: one "
            "process uses the ranks' rates"
        )
    if records.ranks[0].every > 1:
        notes.append(
            f"of large tensors, one element in {records.ranks[0].every} is compared, and all "
            "weights at the start"
        )
    if (skipped := records.ranks[0].skipped) is not None:
        notes.append(
            f"the steps are those from the end of the first epoch on: {counted(skipped, 'step')} "
            "before it loaded their batches and computed nothing"
        )
    if any(record.ended_early for record in records.ranks):
        notes.append(f"the script ended after {counted(records.steps, 'step')}")
    if records.reduces_in_step:
        notes.append("the optimizer reduces gradients in its step: its updates are compared")
    if not causes.of_draws(records) and (draws := causes.of_draws(records, any_seed=True)):
        notes.append(f"{draws.deviation}: all have the seed of the weights; seed noise by rank")
    if records.local_steps:
        notes.append("only the mean of the ranks' first gradients is compared")
    if records.epsilon > 1e-4:
        notes.append(
            f"the forward pass rounds to 16 bits: gradients that differ by less than "
            f"{records.floor:.2g} count as equal"
        )
    return notes
