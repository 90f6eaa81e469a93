"""`shardmark verify`: verifies that the strategies train the same model."""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from shardmark.base.files.scratch import scratch_folder
from shardmark.base.text import as_text, say, say_text
from shardmark.cli.arguments import EngineOption, ExperimentName, Overrides, TextOrJson, with_engine

if TYPE_CHECKING:
    from shardmark.base.results.verification import Verification

NOT_EQUIVALENT = 1
UNDECIDED = 2


def verify(
    experiment: ExperimentName,
    overrides: Overrides = None,
    form: Annotated[
        TextOrJson, typer.Option("--format", help="json has every check.")
    ] = TextOrJson.TEXT,
    engine: EngineOption = None,
) -> None:
    """Compare a few steps of every strategy with one process that does the work of all.

    Exit code 0 if every strategy that can run here is equivalent; 1 if one is not, or fails; 2 if
    none is worse than undecided, or no strategy can run here.
    """
    from shardmark.base.results.verification import is_accepted, is_undecided
    from shardmark.base.text import render_json
    from shardmark.bench.launch.engines import serve_as_node
    from shardmark.bench.launch.listener import ProgressListener
    from shardmark.bench.launch.session import verify_experiment
    from shardmark.bench.progress.lines import Lines
    from shardmark.experiment.load import load_experiment
    from shardmark.experiment.matrix import expand

    resolved = load_experiment(experiment, with_engine(engine, overrides))
    plan = expand(resolved)
    exit_code = serve_as_node(resolved, plan, partial(say, error=form is TextOrJson.JSON))
    if exit_code is not None:
        raise typer.Exit(exit_code)
    with scratch_folder() as folder:
        listener = ProgressListener() if form is TextOrJson.JSON else Lines()
        scratch = folder / "verification"
        verification = verify_experiment(
            resolved, scratch, plan=plan, listener=listener, store=True
        )
    if form is TextOrJson.JSON:
        say_text(render_json(json.loads(verification.model_dump_json())))
    else:
        say(*_text(verification))
    doubtful = [verdict for verdict in verification.verdicts if not is_accepted(verdict)]
    if doubtful:
        raise typer.Exit(UNDECIDED if all(map(is_undecided, doubtful)) else NOT_EQUIVALENT)
    if all(verdict.equivalent is None for verdict in verification.verdicts):
        raise typer.Exit(UNDECIDED)  # no strategy can run here


def _text(verification: Verification) -> list[str]:
    """Return the summary, and a line for each verdict with the cause of a deviation."""
    from shardmark.base.results.verification import numerics_text, verdict_text

    tried = [verdict for verdict in verification.verdicts if verdict.tried_as is None]
    same = sum(verdict.equivalent is True for verdict in tried)
    reference = f"the reference: {verification.reference}; {verification.steps} steps"
    checks = (check for verdict in tried for check in verdict.checks)
    weights = dict.fromkeys(
        f"sample weights: {text}"
        for check in checks
        if check.name == "sample weights" and (text := str(check.found).partition(": ")[2])
    )
    lines = [f"{same} of {len(tried)} train the same as {reference}", *weights, ""]
    causes: dict[str, int] = {}
    width = max((len(verdict.strategy) for verdict in tried), default=0)
    for verdict in tried:
        options = {**verdict.strategy_options, **verdict.varied}
        rest = "".join(f"  {key}={as_text(value)}" for key, value in options.items())
        ranks = "1 rank " if verdict.world_size == 1 else f"{verdict.world_size} ranks"
        head = f"{verdict.strategy:{width}}  {ranks}  {verdict.precision}{rest}"
        lines.append(f"{head}  {verdict_text(verdict)}")
        others = sum(other.tried_as == verdict.id for other in verification.verdicts)
        if others:
            lines.append(f"    holds for {others} more cells: other ranks, batches or seeds")
        if numerics := numerics_text(verdict.mathematics):
            lines.append(f"    {numerics}")
        if verdict.cause is None:
            continue
        cause = f"{verdict.cause.text} ({verdict.cause.evidence})"
        number = causes.setdefault(cause, len(causes) + 1)
        again = f"    cause {number}: {cause}" in lines
        lines.append(f"    cause {number}{', as above' if again else f': {cause}'}")
        if verdict.equivalent is False:
            lines.append(f"    first deviation: {verdict.cause.first_deviation}")
        if verdict.cause.setting and not again:
            lines.append(f"    setting: {verdict.cause.setting}")
    return lines
