"""Audits old releases of trainers that are known to train wrong, and the releases that mend them.

Run:  python benchmarks/old_trainers.py [--only NAME ...] [--again]

Each release is installed beside the environment (`pip install --no-deps --target`), and the scripts
of `benchmarks/trainers/old` run on it by PYTHONPATH.  Answers are stored one a line, so that the
command goes on where it was interrupted.  A second run without Shardmark prints the norms of the
gradients of two ranks and of one process with the same rows.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "2026-11-29-old-trainers.jsonl"
SECONDS = 420


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A fault of a released library, and the plain use that touches it."""

    thread: str
    fault: str
    script: str
    causes: tuple[str, ...]
    """Causes that name the fault."""
    faulty: str
    """Requirements of the last release with the fault."""
    mended: str
    """Those of the first one without it; empty if there is none."""
    arguments: str = ""
    audit: str = ""
    alone: str | None = None
    """Options with which one process takes the same steps; None: it does not."""
    both: str = "--lr 0"
    """Options of both runs without Shardmark."""
    sharded: bool = False
    """True if each rank's optimizer has a part of the gradient."""
    why: str = ""
    """Explanation of the answer, for the table."""


def transformers(version: str, tokenizers: str, hub: str, accelerate: str) -> str:
    return (
        f"transformers=={version} tokenizers=={tokenizers} huggingface_hub=={hub} "
        f"accelerate=={accelerate}"
    )


HF_4_45 = transformers("4.45.2", "0.20.3", "0.26.5", "1.0.1")
HF_4_46 = transformers("4.46.3", "0.20.3", "0.26.5", "1.1.1")
HF_4_47 = transformers("4.47.1", "0.21.0", "0.26.5", "1.2.1")
HF_4_48_0 = transformers("4.48.0", "0.21.0", "0.27.1", "1.2.1")
HF_4_48_1 = transformers("4.48.1", "0.21.0", "0.27.1", "1.2.1")
HF_4_51 = transformers("4.51.3", "0.21.1", "0.30.2", "1.6.0")
HF_4_52 = transformers("4.52.4", "0.21.1", "0.32.4", "1.7.0")
HF_4_53 = transformers("4.53.3", "0.21.2", "0.33.4", "1.9.0")
HF_4_55 = transformers("4.55.4", "0.21.4", "0.34.4", "1.10.1")
DATASETS = " datasets==4.4.1 dill==0.4.0 multiprocess==0.70.18"
ONE_BATCH = "--batch 32 --accumulate 1"
UNCLIPPED = "--lr 0 --clip 1e9"

CASES = {
    "trainer-accumulation": Case(
        thread="huggingface/transformers#34191",
        fault="the mean of each micro-batch is divided by their number, whatever their tokens",
        script="trainer_language.py", causes=("uneven_micro_batches",),
        faulty=HF_4_45, mended=HF_4_46, alone=ONE_BATCH, both=UNCLIPPED,
    ),
    "trainer-tokens-of-ranks": Case(
        thread="huggingface/transformers#39392, #39395",
        fault="tokens are counted on each rank alone (`average_tokens_across_devices=False` is "
        "the default)",
        script="trainer_language.py", causes=("uneven_weights",),
        faulty=HF_4_53, mended=HF_4_55, alone=ONE_BATCH, both=UNCLIPPED,
    ),
    "trainer-last-window": Case(
        thread="huggingface/transformers#38837, #39659",
        fault="the last window of an epoch is divided by `gradient_accumulation_steps`",
        script="trainer_classifier.py", audit="--until-epoch", causes=("short_window",),
        faulty=HF_4_53, mended=HF_4_55, alone=ONE_BATCH, both=UNCLIPPED,
    ),
    "trainer-times-accumulation": Case(
        thread="huggingface/transformers#35663, #35651",
        fault="the gradient of a language model is multiplied by the number of micro-batches",
        script="trainer_language.py", causes=("accumulation_not_divided",),
        faulty=HF_4_48_0, mended=HF_4_48_1, alone=ONE_BATCH, both=UNCLIPPED,
    ),
    "trainer-other-models": Case(
        thread="huggingface/transformers#37766",
        fault="the loss of models without `num_items_in_batch` is not divided",
        script="trainer_classifier.py", causes=("accumulation_not_divided",),
        faulty=HF_4_47, mended=HF_4_48_1, alone=ONE_BATCH, both=UNCLIPPED,
    ),
    "trl-dpo": Case(
        thread="huggingface/trl#2615, huggingface/transformers#35856",
        fault="DPO's loss is not divided by the number of micro-batches",
        script="trl_preferences.py", causes=("accumulation_not_divided",),
        faulty="trl==0.13.0 " + HF_4_48_1 + DATASETS, mended="trl==0.14.0 " + HF_4_48_1 + DATASETS,
        alone="--batch 16 --accumulate 1", both=UNCLIPPED,
    ),
    "lightning-static-graph": Case(
        thread="Lightning-AI/pytorch-lightning#18086, #21251",
        fault="manual optimization with `static_graph=True`: the first step is not reduced",
        script="lightning_manual.py", causes=("not_reduced", "ranks_disagree"),
        faulty="lightning==2.5.5", mended="lightning==2.6.0", alone="--batch 16",
    ),
    "accelerate-same-order": Case(
        thread="huggingface/accelerate#2157, #2117",
        fault="`set_epoch` is not called: all epochs have one order",
        script="accelerate_shuffled.py", audit="--until-epoch", causes=("same_order_every_epoch",),
        faulty="accelerate==0.24.1", mended="accelerate==0.30.1", both="--show",
    ),
    "accelerate-shuffle": Case(
        thread="huggingface/accelerate#2268",
        fault="without a seed of the user, each rank shuffles by its own",
        script="accelerate_shuffled.py",
        causes=("data_repeated", "data_dropped", "data_divided_twice"),
        faulty="accelerate==0.25.0", mended="accelerate==0.30.1", both="--show",
    ),
    "deepspeed-shared-encoder": Case(
        thread="deepspeedai/DeepSpeed#8224, #8245",
        fault="ZeRO-2 and bf16: a module that is used twice in a step gets a part of its gradient",
        script="deepspeed_engine.py", arguments="--stage 2",
        causes=("not_reduced", "ranks_disagree"),
        faulty="deepspeed==0.19.3", mended="deepspeed==0.19.8", alone="--batch 16", sharded=True,
        why=": this script does not show the fault, its norms are those of one process",
    ),
    "deepspeed-bf16-without-zero": Case(
        thread="deepspeedai/DeepSpeed#7837, #7839",
        fault="ZeRO-0 and bf16: gradients are divided by a loss scale that nobody applied, and "
        "are not set to zero",
        script="deepspeed_engine.py", arguments="--stage 0", causes=("gradient_rescaled",),
        faulty="deepspeed==0.18.5", mended="deepspeed==0.18.6", alone="--batch 16",
    ),
    "deepspeed-fp16-without-zero": Case(
        thread="deepspeedai/DeepSpeed#8393",
        fault="ZeRO-0 and fp16: gradients are divided by a loss scale that nobody applied; no "
        "release mends it yet",
        script="deepspeed_engine.py", arguments="--stage 0 --fp16", causes=("gradient_rescaled",),
        faulty="deepspeed==0.19.8", mended="", alone="--batch 16",
    ),
    "metric-learning": Case(
        thread="KevinMusgrave/pytorch-metric-learning#363",
        fault="each rank's gradient is its share of the sum, and DDP averages",
        script="metric_learning.py", causes=("averaged_twice", "averaged_sum"),
        faulty="pytorch-metric-learning==0.9.99", mended="pytorch-metric-learning==1.0.0",
        alone="--batch 16",
    ),
    "lightly-barlow-twins": Case(
        thread="lightly-ai/lightly#1977",
        fault="the all-reduce has no backward pass, and DDP averages",
        script="lightly_pretraining.py", arguments="--loss barlow --gather",
        causes=("averaged_twice", "averaged_sum", "gathered_without_gradients"),
        faulty="lightly==1.5.25", mended="lightly==1.5.26", alone="--batch 16",
        why=", not named: the loss also normalises by the samples of one rank, in the mended "
        "release, too, so that no factor explains the gradient",
    ),
    "lightly-gathered-negatives": Case(
        thread="lightly-ai/lightly#1531",
        fault="the gather's backward pass leaves out the gradients of the other ranks",
        script="lightly_pretraining.py", arguments="--loss ntxent --gather",
        causes=("gathered_without_gradients",),
        faulty="lightly==1.5.2", mended="lightly==1.5.5", alone="--batch 16",
    ),
    "lightly-shifted-labels": Case(
        thread="lightly-ai/lightly#1176, #1177",
        fault="without gathering, labels of rank 1 are shifted by the batch",
        script="lightly_pretraining.py", arguments="--loss ntxent", causes=(),
        faulty="lightly==1.4.2", mended="lightly==1.4.3", alone="--batch 16",
        why=": the fault is loud, labels of rank 1 exceed the logits (the mend came after 1.4.3)",
    ),
    "trl-orpo": Case(
        thread="huggingface/trl#3716",
        fault="ORPO's loss is not divided by the number of micro-batches",
        script="trl_preferences.py", arguments="--method ORPO",
        causes=("accumulation_not_divided",),
        faulty="trl==0.19.1 " + HF_4_51 + DATASETS, mended="trl==0.20.0 " + HF_4_51 + DATASETS,
        alone="--batch 16 --accumulate 1", both=UNCLIPPED,
    ),
    "trainer-epoch-tail": Case(
        thread="huggingface/transformers#35387, #37923",
        fault="the last window takes `rows % gradient_accumulation_steps` batches and drops others",
        script="trainer_language.py", arguments="--rows 86", audit="--until-epoch",
        causes=("data_dropped",),
        faulty=HF_4_51, mended=HF_4_52, alone=ONE_BATCH, both=UNCLIPPED,
        why=": the answer is another fault of both releases, the weights of the ranks; the window "
        "at the end, whose norm is off by 74 %, is compared with one process, and not named",
    ),
    "deepspeed-offload": Case(
        thread="deepspeedai/DeepSpeed#6550",
        fault="ZeRO-2 with offloading: accumulated gradients are copied over each other",
        script="deepspeed_engine.py", arguments="--stage 2 --offload --accumulate 2",
        causes=(),
        faulty="deepspeed==0.15.1", mended="deepspeed==0.15.2", sharded=True,
        alone="--batch 32 --accumulate 1",
    ),
}  # fmt: skip


def installed(requirements: str, folder: Path) -> Path:
    """Returns a folder with these releases; its last file says that it is complete."""
    directory = folder / re.sub(r"[^a-zA-Z0-9.]+", "-", requirements)[:120]
    done = directory / "complete"
    if not done.exists():
        words = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation"]
        settings = {**os.environ, "DS_BUILD_OPS": "0", "DS_ACCELERATOR": "cpu"}
        words += ["--upgrade", "--target", str(directory), *requirements.split()]
        subprocess.run(words, check=True, env=settings)
        done.touch()
    return directory


def run(words: list[str], releases: Path) -> subprocess.CompletedProcess[str]:
    settings = {**os.environ, "PYTHONPATH": str(releases), "DS_ACCELERATOR": "cpu"}
    settings |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    settings["TORCH_EXTENSIONS_DIR"] = str(releases / "extensions")  # what DeepSpeed compiles
    words = ["timeout", str(SECONDS), sys.executable, "-m", *words]
    with tempfile.TemporaryDirectory() as folder:
        ended = subprocess.run(
            words, cwd=folder, env=settings, capture_output=True, text=True, check=False
        )
    ended.stderr = ended.stderr.replace(f"{HERE.parent}/", "")  # results name no machine
    return ended


def audited(case: Case, releases: Path) -> dict[str, Any]:
    words = ["shardmark", "audit", "--ranks", "2", "--format", "json", *case.audit.split(), "--"]
    script = [str(HERE / "trainers" / "old" / case.script), *case.arguments.split()]
    started = time.monotonic()
    ended = run([*words, *script], releases)
    facts: dict[str, Any] = {"seconds": round(time.monotonic() - started)}
    if not ended.stdout.startswith("{"):
        return facts | {"same": None, "answer": ended.stderr[-1500:], "findings": []}
    audit = json.loads(ended.stdout)["audits"][0]
    return facts | {name: audit[name] for name in ("same", "answer", "findings", "notes", "checks")}


def norms(case: Case, releases: Path, ranks: int, options: str) -> str:
    """Returns what the steps of a run without Shardmark get, or its last error."""
    words = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    script = str(HERE / "trainers" / "old" / case.script)
    arguments = f"{case.arguments} {case.both} {options}".split()
    ended = run([*words, str(HERE / "gradient_norms.py"), script, *arguments], releases)
    if "--show" in case.both:
        return drawn(ended.stdout)
    by_rank: dict[str, list[float]] = defaultdict(list)
    for rank, norm in re.findall(r"norm of rank (\d+): ([\d.e+-]+|nan|inf)", ended.stdout):
        by_rank[rank].append(float(norm))
    steps = list(zip(*by_rank.values(), strict=False))[:3]
    if not steps:
        return ended.stderr[-400:]
    if case.sharded:
        return ", ".join(f"{sum(norm**2 for norm in step) ** 0.5:.4g}" for step in steps)
    return ", ".join("/".join(dict.fromkeys(f"{norm:.4g}" for norm in step)) for step in steps)


def drawn(printed: str) -> str:
    rows: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for epoch, rank, numbers in re.findall(r"rows epoch (\d) rank (\d): \[([\d, ]+)\]", printed):
        rows[epoch][rank] += map(int, numbers.split(", "))
    first = [row for rank in rows["0"].values() for row in rank]
    equal = "the same" if rows["0"] == rows["1"] else "another"
    return f"{len(set(first))} of {len(first)} rows differ; {equal} order in epoch 2"


def last_line(text: str) -> str:
    """The last line of a text, or of its errors."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return next((line for line in reversed(lines) if "Error" in line), lines[-1] if lines else "")


def table(rows: dict[tuple[str, str], dict[str, Any]]) -> None:
    print("| fault | thread | faulty release | mended release | found again |")
    print("| --- | --- | --- | --- | --- |")
    for name, case in CASES.items():
        cells = [f"`{name}`: {case.fault}", case.thread]
        for side, releases in (("faulty", case.faulty), ("mended", case.mended)):
            row = rows.get((name, side))
            if row is None:
                cells.append("")
                continue
            found = ", ".join(f"`{one['name']}` {one['deviation']}" for one in row["findings"])
            if not found and row["same"] is not True:
                found = last_line(row["answer"])
            exit_code = {True: 0, False: 1, None: 2}[row["same"]]
            text = " ".join(f"{exit_code} {found}".split())
            cells.append(f"{releases.split()[0]}: {text}; norms {last_line(row['norms'])}")
        row = rows.get((name, "faulty"))
        if row is None:
            print("| " + " | ".join(cells) + " | not run |")
            continue
        named = [one["name"] for one in row["findings"] if one["name"] in case.causes]
        mended = rows.get((name, "mended"), {"findings": []})
        causes = [[one["name"] for one in side["findings"]] for side in (row, mended)]
        both = causes[0] and causes[0] == causes[1] and not named  # another fault of both
        again = "yes" if row["same"] is False and not both else "no"
        cells.append((f"{again}, named" if named else again) + case.why)
        print("| " + " | ".join(cells) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--again", action="store_true", help="audit also what is stored")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir(), "releases"))
    options = parser.parse_args()
    stored = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    rows = {(row["case"], row["side"]): row for row in map(json.loads, stored)}
    for name in options.only:
        case = CASES[name]
        for side, requirements in (("faulty", case.faulty), ("mended", case.mended)):
            if not requirements or ((name, side) in rows and not options.again):
                continue
            releases = installed(requirements, options.folder)
            row = {"case": name, "side": side, "requirements": requirements}
            # First without Shardmark: what DeepSpeed compiles stays for the audit.
            row["norms"] = norms(case, releases, 2, "")
            if case.alone is not None:
                row["norms"] += f" (one process: {norms(case, releases, 1, case.alone)})"
            print(name, side, row["norms"], flush=True)
            row |= audited(case, releases)
            print(" ", row["seconds"], "s:", row["answer"][:300], flush=True)
            rows[name, side] = row
            with RESULTS.open("a") as file:
                file.write(json.dumps(row) + "\n")
    table(rows)


if __name__ == "__main__":
    main()
