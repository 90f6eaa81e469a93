"""Grades exercises: `python grade.py 3`, or `python grade.py all --submission FOLDER`.

A copy of the exercise runs beside new copies of the lab's other files, so that changes of link.py
or lab.py have no effect.  The exit code is 0 for passed, 1 for failed, 2 for not decided.
"""

import argparse
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

PASS, FAIL, UNDECIDED = "passed", "failed", "not decided"
MODEL_MB = 2.14  # the model's gradients
EXERCISES = {  # file, most messages of a step, least and most of Adam's state that a rank holds
    "1": ("1_all_reduce.py", 34, 0, 1),
    "2": ("2_buckets.py", 5, 0, 1),
    "3": ("3_overlap.py", 5, 0, 1),
    "4": ("4_sharded_optimizer.py", 7, 0.3, 0.67),
    "5": ("5_accumulation.py", 6, 0, 1),
    "6": ("6_find_the_fault.py", None, None, None),
}
MARGIN = 0.1  # a gain below 10 % is none
AUDIT = "audit --format json --writes-are-fine --ranks 2 --timeout 200 --against".split()
RACE = (
    "time --keep-if-faster --margin 10 --budget 2m --ranks 2 --steps 5 --warmup 2 --format json "
    "--set measure.verify=false --set measure.probe=false"
).split()
COLUMNS = (
    *("exercise", "grade", "same training", "step, ms", "times as fast as the reference"),
    *("speed-up on 2 ranks", "messages a step", "MB a step", "sha256 of the file"),
)


def run(folder, *words, **variables):
    """Run a module of Python in the lab's folder."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("LAB_", "LINK_"))}
    return subprocess.run(
        [sys.executable, "-m", *words],
        cwd=folder,
        env={**inherited, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", **variables},
        capture_output=True,
        text=True,
    )


def shardmark(folder, *words):
    """Run a command of Shardmark; return its document, or None, and the last line of its errors."""
    ended = run(folder, "shardmark", *words, LAB_STEPS="1000")
    error = (ended.stderr.strip().splitlines() or ["no output"])[-1]
    document = json.loads(ended.stdout) if ended.stdout.startswith("{") else None
    return document, re.sub(r".*exit code \d+: (\w+Error: )?", "", error)


def counted(folder, file, ranks):
    """Take ten steps; return the largest of the ranks' counts, or None if not all end."""
    words = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), file]
    run(folder, *words, LAB_STEPS="10", LAB_REPORT=str(folder))
    reports = [
        json.loads(path.read_text()) for path in folder.glob(f"{Path(file).stem}-{ranks}-*.json")
    ]
    if len(reports) < ranks:
        return None
    return {key: max(report[key] for report in reports) for key in reports[0]}


def grade(number, submission, values):
    """Return the verdict on an exercise and its reason; add what was measured to `values`."""
    with tempfile.TemporaryDirectory(prefix="lab-") as place:
        _, error = shardmark(place, "init", "--lab", "--out", "lab")
        folder, file = Path(place, "lab"), EXERCISES[number][0]
        if not folder.is_dir():
            return UNDECIDED, error
        shutil.copy(submission / file, folder)
        document, error = shardmark(folder, *AUDIT, f"reference.py {number}", "--", file)
        if document is None:
            return FAIL, error
        audit = document["audits"][-1]
        values["same training"] = {True: "yes", False: "no", None: "not decided"}[audit["same"]]
        if audit["same"] is not True:
            return UNDECIDED if audit["same"] is None else FAIL, audit["answer"].splitlines()[0]
        if number == "6":
            return PASS, ""
        return measured(number, folder, values)


def measured(number, folder, values):
    """Return the verdict on an exercise that trains right: by its counts, and by the race."""
    file, reference = EXERCISES[number][0], f"reference.py {number}"
    counts, alone = counted(folder, file, 2), counted(folder, file, 1)
    if counts is None or alone is None:
        return FAIL, "it does not take ten steps on two ranks and on one"
    fault = fault_of(number, counts, alone, values)
    if fault:
        return FAIL, fault
    document, error = shardmark(folder, *RACE, reference, file)
    if document is None:  # a container may not allow private copies of files
        document, error = shardmark(folder, *RACE, "--writes-are-fine", reference, file)
    return (UNDECIDED, error) if document is None else judged(number, document, values)


def fault_of(number, counts, alone, values):
    """Return what was counted and is not what the exercise asks for; empty if all is."""
    _, most_messages, *share = EXERCISES[number]
    messages, megabytes = counts["messages"], counts["sent_bytes"] / 1e6
    values["messages a step"], values["MB a step"] = f"{messages:.1f}", f"{megabytes:.2f}"
    speed_up = 2 * alone["step_seconds"] / counts["step_seconds"]  # ranks add samples
    values["speed-up on 2 ranks"] = f"{speed_up:.2f}"
    for quantity, value, least, most in (
        ("messages a step", messages, 0, most_messages),
        ("MB a step", megabytes, MODEL_MB, 2 * MODEL_MB),
        ("of Adam's state on a rank", counts["state_bytes"] / (2e6 * MODEL_MB), *share),
    ):
        if not 0.99 * least <= value <= 1.01 * most:
            return f"{value:.3g} {quantity}, where {least:.3g} to {most:.3g} are asked for"
    return ""


def judged(number, document, values):
    """Return the verdict that the race against the reference gives."""
    (result,) = document["race"]
    row = next(row for row in document["rows"] if row["strategy"] == result["variant"])
    values["step, ms"] = text_of(row["metrics"]["step_seconds"], 1e3)
    values["times as fast as the reference"] = text_of(result | {"value": result["ratio"]})
    low, high = result["low"] or 0, result["high"] or float("inf")
    speed = f"{values['times as fast as the reference']} times as fast as reference.py {number}"
    if high < 1 + MARGIN:
        return FAIL, speed
    if low > 1 and result["ratio"] >= 1 + MARGIN:
        return PASS, speed
    return UNDECIDED, f"{speed}; run it again on an idle machine"


def text_of(estimate, scale=1):
    """Return a value with its interval; without it if there is none, or one that tells nothing."""
    if not estimate["value"]:
        return "not measured"
    value, low, high = (scale * (estimate[key] or 0) for key in ("value", "low", "high"))
    return f"{value:.3g}" + (f" ({low:.3g} to {high:.3g})" if 0 < high < 10 * value else "")


def hand_in(submission, number, values):
    """Write the exercise's row of the page, beside those that are there."""
    page, file = submission / "hand-in.md", submission / EXERCISES[number][0]
    lines = page.read_text().splitlines() if page.exists() else []
    rows = {line[2]: line for line in lines if re.match(r"\| \d \|", line)}
    values["sha256 of the file"] = hashlib.sha256(file.read_bytes()).hexdigest()[:16]
    rows[number] = f"| {' | '.join(values.get(column, '') for column in COLUMNS)} |"
    text = ["# Lab: distributed training", "", f"| {' | '.join(COLUMNS)} |"]
    text += ["| --- " * len(COLUMNS) + "|", *(rows[key] for key in sorted(rows))]
    versions = ", ".join(f"{name} {version(name)}" for name in ("shardmark", "torch"))
    text += ["", "Times of 2 ranks over the lab's link, with 95 % intervals.", ""]
    text += [f"{os.cpu_count()} cores, Python {platform.python_version()}, {versions}.", ""]
    page.write_text("\n".join(text))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("exercise", choices=[*EXERCISES, "all"])
    parser.add_argument("--submission", type=Path, default=Path(__file__).parent)
    options = parser.parse_args()
    verdicts = set()
    for number in EXERCISES if options.exercise == "all" else [options.exercise]:
        values = {"exercise": number}
        values["grade"], reason = grade(number, options.submission, values)
        verdicts.add(values["grade"])
        hand_in(options.submission, number, values)
        parts = f"exercise {number}", values["grade"], reason
        print(": ".join(filter(None, parts)), flush=True)
    raise SystemExit(1 if FAIL in verdicts else 2 if UNDECIDED in verdicts else 0)


if __name__ == "__main__":
    main()
