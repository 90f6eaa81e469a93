"""Runs or verifies a whole experiment.  Imports no torch."""

from __future__ import annotations

from contextlib import closing, suppress
from pathlib import Path

from shardmark.base.errors import StorageError
from shardmark.base.results.verification import LOGS_FOLDER, Verification, write_verification
from shardmark.bench.launch.audited import first_command
from shardmark.bench.launch.engine import Engine
from shardmark.bench.launch.engines import build_engine
from shardmark.bench.launch.input_checks import training_samples
from shardmark.bench.launch.listener import NullListener, ProgressListener
from shardmark.bench.launch.run_options import RunOptions
from shardmark.bench.launch.session import RunSession
from shardmark.bench.launch.trial import modules_of
from shardmark.bench.launch.verification import (
    cells_of,
    proofs_folder,
    read_proofs,
    verification_of,
    verify_cells,
)
from shardmark.experiment.experiment import Experiment
from shardmark.experiment.matrix import TrialPlan, expand


def run_experiment(
    experiment: Experiment,
    out: Path,
    options: RunOptions | None = None,
    *,
    plan: TrialPlan | None = None,
    listener: ProgressListener | None = None,
    engine: Engine | None = None,
) -> Path:
    """Run every trial that has no result in `out` yet, and return `out`.

    Raises `InputError` for an experiment or a folder that cannot be used, `StorageError` for a
    full disk, `KeyboardInterrupt` after storing an interrupted trial.
    """
    options, listener = options or RunOptions(), listener or NullListener()
    with RunSession.open(experiment, out, options, listener, plan=plan, engine=engine) as session:
        session.run()
    return out


def verify_experiment(
    experiment: Experiment,
    scratch: Path,
    *,
    plan: TrialPlan | None = None,
    listener: ProgressListener | None = None,
    engine: Engine | None = None,
    store: bool = False,
) -> Verification:
    """Return a verdict on every cell of the experiment; measure nothing.

    With `store`, runs of the same code, data and versions reuse the verdicts.  Raises `InputError`
    for an experiment that cannot be used.
    """
    listener = listener or NullListener()
    plan = plan or expand(experiment)
    for _ in training_samples(plan.trials):
        pass
    engine = engine or build_engine(experiment, plan, listener.note)
    with closing(engine):
        listener.doing("loading torch")
        machine = engine.machine(experiment.device)
        cells = cells_of(plan.on(machine.device_type).trials)
        proofs = proofs_folder(plan, engine)
        engine.load(modules_of(cells), machine.device_type)
        verdicts = verify_cells(
            cells,
            engine=engine,
            machine=machine,
            scratch=scratch,
            logs=proofs / LOGS_FOLDER,
            listener=listener,
            first=first_command(plan),
        )
        verification = verification_of(cells, verdicts)
        if store and proofs == proofs_folder(plan, engine):  # the code has not changed meanwhile
            with suppress(OSError, StorageError):
                proofs.mkdir(parents=True, exist_ok=True)
                stored = (*read_proofs(proofs), *verification.verdicts)
                by_id = {verdict.id: verdict for verdict in stored}
                update = {"verdicts": (*by_id.values(),)}
                write_verification(proofs, verification.model_copy(update=update))
        return verification
