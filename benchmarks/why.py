"""Score `shardmark why` on commands that are slow for a known reason, and on quiet ones.

Run:  python benchmarks/why.py [--only NAME,...] [--quiet-runs] [--budget 4m]

Amounts that no number gives are measured here, against the command without the fault.  A thin link
needs root, `tc` and `unshare`.  Nothing else may run on the machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.zoo.slow.cases import FOLDER, QUIET, SLOW, Slow

STEPS = 40  # a multiple of what repeats: lengths after 4 steps, evaluations after 10
TOLERANCE = 0.15
ROUNDS = 4
EXPECTED = {
    "slow_input": {"kind": "input"},
    "slow_backward": {"kind": "late_rank", "of": "own work", "phase": "backward"},
    "slow_core": {"kind": "late_rank", "of": "place"},
    "thin_link": {"kind": "communication"},
    "many_reductions": {"kind": "communication"},
    "unlike_rows": {"kind": "late_rank", "of": "rows"},
    "evaluation": {"kind": "evaluation"},
    "checkpoint": {"kind": "checkpoint"},
    "print": {"kind": "logging"},
    "host_bound": {"kind": "own_code"},
}
"""Facts of the first part by fault; what lies between steps by the fault's way."""
LINK = "tc qdisc add dev lo root tbf rate {} burst 64kb latency 50ms"
THIN = f"ip link set lo mtu 16000 up && {LINK} && {{}}"  # a packet is smaller than the burst


def document_of(words: Sequence[str], link: str | None, folder: str) -> dict[str, Any]:
    """The JSON document of a command of Shardmark, in a namespace with a thin link if given."""
    verb, *rest = words
    words = [sys.executable, "-m", "shardmark", verb, "--format", "json", *rest]
    if link:
        words = ["unshare", "--net", "sh", "-c", THIN.format(link, 'exec "$@"'), "sh", *words]
    ended = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
    if not ended.stdout.startswith("{"):
        raise SystemExit(f"{' '.join(words)}\n{ended.stdout}{ended.stderr}")
    document: dict[str, Any] = json.loads(ended.stdout)
    return document


def step_seconds(command: str, ranks: int, link: str | None = None) -> float:
    """Mean of a step in one trial of a command; a median would hide evaluations."""
    words = ("time", "--no-audit", "--repeats", "1", "--steps", str(STEPS), "--ranks", str(ranks))
    means: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        document = document_of([*words, "--", f"{FOLDER}/{command}"], link, folder)
        for path in Path(folder, document["run"]).glob("trials/*/result.json"):
            for rank in json.loads(path.read_text())["ranks"]:
                (window,) = rank["windows"]
                steps = window["end_step"] - window["first_step"]
                means.append(window["window_seconds"] / steps)
    return max(means)


def true_ms(case: Slow) -> float:
    """The injected amount, or the difference to the command without the fault."""
    if case.amount_ms is not None or not case.kind:
        return case.amount_ms or 0.0
    return 1e3 * statistics.median(
        step_seconds(case.command, case.ranks, case.link)
        - step_seconds(case.amount_from, case.ranks)
        for _ in range(ROUNDS)
    )


def verdicts(case: Slow, true: float, document: dict[str, Any]) -> dict[str, bool]:
    """What of an answer is right; its first part is the cause that it names."""
    if not case.kind:
        return {"cause": not document["parts"]}
    nothing: dict[str, Any] = {"rank": None, "seconds": {"value": 0.0}}
    part = document["parts"][0] if document["parts"] else nothing
    way = case.command.rpartition("--way ")[2]
    named = EXPECTED.get(case.kind, EXPECTED.get(way, {})).items() <= part.items()
    if case.kind == "many_reductions":
        named = named and bool(document["counts"].get("findings"))
    right = {"cause": named, "amount": abs(1e3 * part["seconds"]["value"] / true - 1) <= TOLERANCE}
    return right if case.rank is None else {**right, "rank": part["rank"] == case.rank}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="names or kinds, with commas between them")
    parser.add_argument("--quiet-runs", action="store_true", help="the commands without a fault")
    parser.add_argument("--budget", default="4m", help="of each answer")
    options = parser.parse_args()
    chosen = set(options.only.split(",")) - {""}
    cases = QUIET if options.quiet_runs else SLOW
    cases = tuple(case for case in cases if not chosen or {case.name, case.kind} & chosen)
    scores: list[dict[str, bool]] = []
    print("| case | fault | rank | ms | answer | rank | ms (interval) | right | wrong | seconds |")
    print("| --- | --- | ---: | ---: | --- | ---: | ---: | --- | --- | ---: |", flush=True)
    for case in cases:
        started = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            words = ["why", "--budget", options.budget, "--", *case.launched()]
            document = document_of(words, case.link, folder)
        taken, true = time.monotonic() - started, true_ms(case)
        score = verdicts(case, true, document)
        scores.append(score)
        part: dict[str, Any] = {"kind": "nothing", "rank": None, "seconds": {}}
        part |= document["parts"][0] if document["parts"] else {}
        cause = " ".join(str(part[name]) for name in ("kind", "of", "phase") if part.get(name))
        ms = [1e3 * (part["seconds"].get(name) or 0.0) for name in ("value", "low", "high")]
        right, wrong = (", ".join(k for k in score if score[k] is v) for v in (True, False))
        print(
            f"| {case.name} | {case.kind} | {case.rank} | {true:.1f} | {cause} | {part['rank']} "
            f"| {ms[0]:.1f} ({ms[1]:.1f} to {ms[2]:.1f}) | {right} | {wrong} | {taken:.0f} |",
            flush=True,
        )
    for name in ("cause", "rank", "amount"):
        counted = [score[name] for score in scores if name in score]
        print(f"\n{name}: {sum(counted)} of {len(counted)} right")


if __name__ == "__main__":
    main()
