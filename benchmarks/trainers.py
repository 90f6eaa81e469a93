"""Audits the plain use of released training libraries, one cell of a matrix after the other.

    python benchmarks/trainers.py [--only transformers,trl] [--cells 'trl_sft:ddp:*'] [--path DIR]

A cell is a script of `benchmarks/trainers`, a kind of data parallelism and a habit.  Its row is
stored as soon as its audit ends; the next command skips it, unless a library has another version.
A cell that audit calls wrong is run again without hooks, by `trainers/confirm.py`, and only what
that shows, too, is called wrong in the table.  The ranks are forked from a process that has
imported the libraries, as those of the zoo's tests: a cell takes seconds in place of a minute.

Libraries that are not installed, or other versions of them, come from a folder, which every process
imports from first; the scripts stay the same.  Its name is `site-packages`: dill, which `datasets`
uses, knows libraries by it:

    pip install --target DIR/site-packages --no-deps transformers==4.45.2 accelerate==1.0.1
    python benchmarks/trainers.py --path DIR/site-packages --only transformers --out old.md

By hand: `PYTHONPATH=DIR/site-packages shardmark audit --ranks 2 --
benchmarks/trainers/transformers_lm.py --parallel ddp --habit accumulation,uneven` (`--until-epoch`
with the habit `epoch`).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from fnmatch import fnmatch
from importlib.metadata import distributions
from pathlib import Path
from runpy import run_path
from tempfile import TemporaryDirectory
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import RESULTS, ROOT, Table, json_lines, surroundings, surroundings_line
from tests.zoo import forked

from shardmark.audit.script import audit_script
from shardmark.base.errors import InputError
from shardmark.base.evidence.accepted import ACCEPTABLE
from shardmark.scripts.command import parse_command
from shardmark.scripts.start import TRACKERS_OFF

SCRIPTS_FOLDER = ROOT / "benchmarks" / "trainers"
PARALLEL = ("ddp", "zero2", "fsdp2", "zero3", "zero1")
HABITS = (
    *("accumulation", "uneven", "epoch", "adapter", "clip", "plain"),
    *("accumulation,uneven", "accumulation,adapter"),
)
"""The habits in the order in which they are audited; `epoch` needs `--until-epoch`."""
STACK = ("torch", "transformers", "accelerate", "deepspeed", "peft")
IMPORTED = (
    "transformers.trainer accelerate lightning deepspeed peft datasets trl sentence_transformers "
    "ignite.engine speechbrain"
)
HEADING = "\n## Matrix\n"
LIMIT_SECONDS = 300
CONFIRM = run_path(str(SCRIPTS_FOLDER / "confirm.py"))
"""Without `GRADIENTS` it only defines functions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """A script of the folder, and the kinds of parallelism that its library does not have here."""

    name: str
    library: str
    packages: tuple[str, ...] = STACK
    missing: Mapping[str, str] = field(default_factory=dict)
    """Reasons by kind of parallelism."""


FSDP_OF_ACCELERATE = {"fsdp2": "Accelerate starts FSDP on an accelerator only, not on CPUs"}
MISSING = {} if torch.cuda.is_available() else FSDP_OF_ACCELERATE
NO_ZERO = dict.fromkeys(("zero1", "zero2", "zero3"), "Lightning's DeepSpeedStrategy needs CUDA")
DDP_ONLY = dict.fromkeys(
    ("fsdp2", "zero1", "zero2", "zero3"), "PyTorch-Ignite and SpeechBrain have DDP"
)
TRL = (*STACK, "trl", "datasets")
SENTENCES = (*STACK, "sentence-transformers", "datasets")
SCRIPTS = (
    Script(name="transformers_lm", library="transformers", missing=MISSING),
    Script(name="transformers_classifier", library="transformers", missing=MISSING),
    Script(name="transformers_seq2seq", library="transformers", missing=MISSING),
    Script(name="transformers_decoder", library="transformers", missing=MISSING),
    Script(name="transformers_experts", library="transformers", missing=MISSING),
    Script(name="accelerate_loop", library="accelerate", missing=MISSING),
    Script(
        name="lightning_loop", library="lightning", packages=(*STACK, "lightning"), missing=NO_ZERO
    ),
    Script(
        name="deepspeed_loop", library="deepspeed", missing={"fsdp2": "DeepSpeed has ZeRO instead"}
    ),
    Script(name="trl_sft", library="trl", packages=TRL, missing=MISSING),
    *(
        Script(name=f"trl_{name}", library="trl", packages=TRL, missing=MISSING)
        for name in ("dpo", "gkd", "gold", "tpo", "online_dpo", "reward", "kto")
    ),
    *(
        Script(name=f"{name}_loop", library=library, packages=(*STACK, library), missing=DDP_ONLY)
        for name, library in (("ignite", "pytorch-ignite"), ("speechbrain", "speechbrain"))
    ),
    *(
        Script(
            name=f"sentence_{name}",
            library="sentence-transformers",
            packages=SENTENCES,
            missing=MISSING,
        )
        for name in ("scores", "pairs", "gathered")
    ),
)
NOT_RUN = (
    "Not in the matrix: the training scripts of timm and torchvision. They are not in the wheels, "
    "and start on CPUs only with patches; so patched, audit calls both right "
    "(`2026-11-28-public-scripts.md`)."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A script with a kind of parallelism and a habit."""

    script: Script
    parallel: str
    habit: str

    @property
    def name(self) -> str:
        return f"{self.script.name}:{self.parallel}:{self.habit}"

    @property
    def words(self) -> list[str]:
        return ["--parallel", self.parallel, "--habit", self.habit]


def cells(libraries: Sequence[str], patterns: Sequence[str]) -> list[Cell]:
    """Return the cells that the options choose, in the order of the patterns."""
    matrix = [
        Cell(script=script, parallel=parallel, habit=habit)
        for parallel in PARALLEL
        for script in SCRIPTS
        for habit in HABITS
        if not libraries or script.library in libraries
    ]
    by_name = {c.name: c for pattern in patterns for c in matrix if fnmatch(c.name, pattern)}
    return [*by_name.values()]


def versions_of(packages: Sequence[str]) -> dict[str, str]:
    """Version by package; the first folder that has it counts, as in an import."""
    paths = [*filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), *sys.path]
    found: dict[str, str] = {}
    for distribution in distributions(path=paths):
        found.setdefault(distribution.name.lower(), distribution.version)
    return {package: found.get(package, "missing") for package in packages}


def audited(cell: Cell) -> dict[str, Any]:
    """Audit a cell, and confirm what is called wrong."""
    script = f"{cell.script.name}.py"
    start = time.monotonic()
    row = answer_of([str(SCRIPTS_FOLDER / script), *cell.words], "epoch" in cell.habit)
    row["seconds"] = round(time.monotonic() - start)
    if row["same"] is False:
        try:
            differs, row["without_hooks"] = CONFIRM["confirm"]([script, *cell.words], without_hooks)
        except (OSError, RuntimeError) as error:  # no step was taken
            differs, row["without_hooks"] = None, [without_path(str(error))]
        row["confirmed"] = differs is True
    return row


def answer_of(words: Sequence[str], until_epoch: bool) -> dict[str, Any]:
    """Audit the words; return the facts of its answer, or its error."""
    try:
        report = audit_script(
            parse_command(words),
            ranks=2,
            until_epoch=until_epoch,
            longest_seconds=LIMIT_SECONDS,
            start=forked.start_forked,
        )
    except InputError as error:
        answer = without_path(str(error).splitlines()[-1])
        return {"same": None, "answer": answer, "findings": [], "largest": None, "method": None}
    deviations = [check.found for check in report.checks if isinstance(check.found, float)]
    return {
        "same": report.same,
        "answer": report.answer,
        "findings": [{"name": f.name, "deviation": f.deviation} for f in report.findings],
        "evidence": [finding.evidence for finding in report.findings[:1]],
        "largest": max(deviations, default=None),
        "method": report.method,
        "frameworks": report.frameworks,
        "notes": report.notes,
    }


def without_hooks(ranks: int, words: Sequence[str], variables: Mapping[str, str]) -> None:
    """Run the words on forked ranks, as `confirm.py` does by torchrun."""
    with TemporaryDirectory() as folder:
        log = Path(folder) / "log.txt"
        code = forked.ForkedScript(words, ranks, variables, log, hooked=False).wait(LIMIT_SECONDS)
        if code != 0:
            raise RuntimeError((log.read_text().splitlines() or [f"exit code {code}"])[-1])


def without_path(text: str) -> str:
    return text.replace(f"{ROOT}/", "")  # results name no machine


def short(row: Mapping[str, Any]) -> str:
    """The answer in a few words."""
    if row["same"] is None:
        return "?"
    if row["same"]:
        return f"right, {row['largest']:.0e}" if row["largest"] is not None else "right"
    name = f"`{row['findings'][0]['name']}`" if row["findings"] else "no cause"
    return f"**{name}**" if row["confirmed"] else f"{name}, not confirmed"


def tables(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """The matrix for each kind of parallelism, what is wrong, and what cannot be told."""
    text = []
    for parallel in PARALLEL:
        lines = []
        for script in SCRIPTS:
            names = [f"{script.name}:{parallel}:{habit}" for habit in HABITS]
            if any(name in rows for name in names):
                shown = [short(rows[name]) if name in rows else "" for name in names]
                lines.append((f"`{script.name}`", *shown))
        if lines:
            table = Table(columns=(parallel, *HABITS), rows=tuple(lines))
            text.append(f"### {parallel}\n\n{table.markdown()}")
        absent = dict.fromkeys(script.missing.get(parallel, "") for script in SCRIPTS)
        text += [f"{parallel}: {reason}." for reason in absent if reason]
    wrong = [
        (
            f"`{name}`",
            "; ".join(f"{f['name']}: {f['deviation']}" for f in row["findings"]) or row["answer"],
            "yes" if {f["name"] for f in row["findings"]} <= set(ACCEPTABLE) else "no",
            "<br>".join(row["without_hooks"][:4]),
        )
        for name, row in rows.items()
        if row["same"] is False
    ]
    untold = [(f"`{name}`", row["answer"]) for name, row in rows.items() if row["same"] is None]
    columns = ("cell", "audit", "can be accepted", "without hooks")
    text += ["### Wrong\n\n" + Table(columns=columns, rows=tuple(wrong)).markdown()]
    text += [
        "### Cannot be told\n\n"
        + Table(columns=("cell", "reason"), rows=tuple(untold), notes=(NOT_RUN,)).markdown()
    ]
    return "\n\n".join(text)


def write(page: Path, rows: Mapping[str, Mapping[str, Any]], around: Mapping[str, Any]) -> None:
    """Write the matrix below its heading; what stands above stays."""
    above = page.read_text().partition(HEADING)[0] if page.exists() else "# Trainers\n"
    stacks = dict.fromkeys(
        ", ".join(f"{name} {version}" for name, version in row["versions"].items())
        for row in rows.values()
    )
    lines = [surroundings_line(around), *(f"- {stack}" for stack in stacks)]
    page.write_text(f"{above}{HEADING}\n" + "\n".join(lines) + f"\n\n{tables(rows)}\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", metavar="LIBRARY,...")
    parser.add_argument("--cells", nargs="+", default=["*"], metavar="SCRIPT:PARALLEL:HABIT")
    parser.add_argument("--path", type=Path, help="folder that is imported from first")
    page = RESULTS / f"{datetime.now(UTC):%Y-%m-%d}-trainers.md"
    parser.add_argument("--out", type=Path, default=page, help="page; its rows are beside it")
    options = parser.parse_args()
    if options.path:  # forked ranks import as this process does
        sys.path.insert(0, str(options.path.resolve()))
    folders = [options.path and str(options.path.resolve()), str(ROOT / "src")]
    folders.append(os.environ.get("PYTHONPATH"))
    os.environ |= {"PYTHONPATH": os.pathsep.join(filter(None, folders)), "HF_HUB_OFFLINE": "1"}
    os.environ |= {**TRACKERS_OFF, "TORCHDYNAMO_DISABLE": "1", forked.FRAMEWORKS_VARIABLE: IMPORTED}
    around, store = surroundings(), options.out.with_suffix(".jsonl")
    stored = {row["cell"]: row for row in json_lines(store)}
    with TemporaryDirectory() as temporary, ExitStack() as stack:
        os.environ["TMPDIR"] = temporary  # of the scripts' files
        stack.callback(lambda: write(options.out, stored, around))  # after Ctrl-C, too
        chosen = cells([*filter(None, options.only.split(","))], options.cells)
        packages = {cell.script.name: cell.script.packages for cell in chosen}
        versions_by_script = {name: versions_of(found) for name, found in packages.items()}
        for cell in chosen:
            versions = versions_by_script[cell.script.name]
            if cell.parallel in cell.script.missing:
                continue
            if stored.get(cell.name, {}).get("versions") != versions:
                row = {"cell": cell.name, "versions": versions, **audited(cell)}
                stored[cell.name] = row
                with store.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                write(options.out, stored, around)
            row = stored[cell.name]
            print(f"{cell.name}: {short(row)}, {row['seconds']} s: {row['answer']}", flush=True)
    print(f"stored as {store} and {options.out.name}")


if __name__ == "__main__":
    main()
