"""Races of two candidates: how often they decide, and after how many pairs.

Run:  python benchmarks/race.py [--races 300]           simulated
      python benchmarks/race.py --real 10 [--budget 60s]  two small scripts, idle machine
      python benchmarks/race.py --scatter 20            their pairs with themselves (decision 039)
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np

from shardmark.base.results.store import load_run
from shardmark.base.statistics.race import Decision, standing
from shardmark.bench.launch.session import run_experiment
from shardmark.experiment.load import from_mapping

MARGIN = 0.01
MOST_PAIRS = 200
LAWS = ("normal", "heavy tails", "skewed", "bursts")


def noise_of(law: str, generator: np.random.Generator, deviation: float) -> np.ndarray:
    """Logarithms of times with a standard deviation, shape (pairs, 2)."""
    size = (MOST_PAIRS, 2)
    if law == "heavy tails":
        values = generator.standard_t(4, size) / math.sqrt(2)
    elif law == "skewed":
        values = generator.gamma(2.0, 1.0, size) / math.sqrt(2)
    elif law == "bursts":  # one trial in ten is disturbed four times as much
        scale = np.where(generator.random(size) < 0.1, 4.0, 1.0)
        values = generator.normal(0, 1, size) * scale / math.sqrt(0.9 + 0.1 * 16)
    else:
        values = generator.normal(0, 1, size)
    return deviation * values


def race(logs: np.ndarray) -> tuple[Decision, int]:
    """Look after each pair until the race is decided."""
    speeds = np.exp(logs)
    for count in range(2, MOST_PAIRS + 1):
        result = standing(list(speeds[:count, 1]), list(speeds[:count, 0]))
        decision = result.decision(MARGIN)
        if decision is not Decision.UNDECIDED:
            return decision, count
    return Decision.UNDECIDED, MOST_PAIRS


LOOP = """
import sys, time, torch
from torch import nn
torch.manual_seed(0)
torch.set_num_threads(1)
{setup}
optimizer = torch.optim.AdamW(model.parameters())
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, targets), 32)
while True:
    for batch, target in loader:
        started = time.perf_counter()
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(batch), target).backward()
        optimizer.step()
        if "--slow" in sys.argv:
            time.sleep(0.05 * (time.perf_counter() - started))
"""
SETUPS = {
    "perceptron": """
inputs, targets = torch.randn(2048, 64), torch.randint(0, 10, (2048,))
model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.Linear(512, 10))
""",
    "transformer": """
inputs, targets = torch.randint(0, 64, (512, 16)), torch.randint(0, 64, (512,))
layer = nn.TransformerEncoderLayer(64, 2, 128, dropout=0.0, batch_first=True)
blocks = nn.TransformerEncoder(layer, 1)
model = nn.Sequential(nn.Embedding(64, 64), blocks, nn.Flatten(), nn.Linear(1024, 64))
""",
}


def race_really(races: int, budget: str) -> None:
    """Print a line for each race of a script with itself, and with a sleep of 5 % of its step."""
    print("| script | second candidate | decision | ratio (interval) | pairs |")
    print("| --- | --- | --- | --- | ---: |")
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(races):
            for name, setup in SETUPS.items():
                Path(folder, "train.py").write_text(LOOP.format(setup=setup))
                for arguments in ("--same", "--slow"):
                    out = tempfile.mkdtemp(dir=folder)
                    ended = subprocess.run(
                        [
                            *(sys.executable, "-m", "shardmark", "time", "--keep-if-faster"),
                            *("--budget", budget, "--format", "json"),
                            *("--out", out, "train.py", f"train.py {arguments}"),
                        ],
                        cwd=folder, capture_output=True, text=True, check=False,
                    )  # fmt: skip
                    (row,) = json.loads(ended.stdout)["race"]
                    interval = f"{row['ratio']:.3f} ({row['low']:.3f} to {row['high']:.3f})"
                    print(
                        f"| {name} | {arguments[2:]} | {row['decision']} | "
                        f"{interval} | {row['pairs']} |",
                        flush=True,
                    )


def scatter(pairs: int) -> None:
    """Print how far pairs of trials of the same script are apart, one after the other and in turns.

    The standard deviation is that of the logarithm of the ratio of their speeds.
    """
    print("| script | trials | standard deviation of a pair | mean | pairs |")
    print("| --- | --- | ---: | ---: | ---: |")
    with tempfile.TemporaryDirectory() as folder:
        for name, setup in SETUPS.items():
            script = Path(folder, "train.py")
            script.write_text(LOOP.format(setup=setup))
            for trials, margin in (("one after the other", None), ("in turns", MARGIN)):
                repeats = {"at_least": pairs, "at_most": pairs, "margin": margin}
                measure = {"window_seconds": 2.0, "verify": False, "max_remeasure": 0}
                measure["repeats"] = repeats
                experiment = from_mapping({
                    "name": "scatter", "device": "cpu", "measure": measure,
                    "workload": {"name": "script", "command": str(script)},
                    "matrix": {"variant": {"one": "", "other": "--same"}},
                })  # fmt: skip
                out = run_experiment(experiment, Path(tempfile.mkdtemp(dir=folder)))
                speeds: dict[int, dict[str, float]] = {}
                for trial in load_run(out).trials:
                    if (speed := trial.metrics.get("samples_per_second")) is not None:
                        speeds.setdefault(trial.repeat, {})[trial.strategy] = speed.value
                logs = [math.log(s["other"] / s["one"]) for s in speeds.values() if len(s) == 2]
                print(
                    f"| {name} | {trials} | {np.std(logs, ddof=1):.3f} | {np.mean(logs):+.3f} | "
                    f"{len(logs)} |",
                    flush=True,
                )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--races", type=int, default=300)
    parser.add_argument("--real", type=int, help="races of each script and kind")
    parser.add_argument("--budget", default="60s", help="of each real race")
    parser.add_argument("--scatter", type=int, help="pairs of each script with itself")
    options = parser.parse_args()
    if options.scatter:
        scatter(options.scatter)
        return
    if options.real:
        race_really(options.real, options.budget)
        return
    races = options.races
    fixed = math.ceil((1.960 + 1.282) ** 2 * 2 * 0.02**2 / math.log1p(MARGIN) ** 2)
    print(f"a fixed design that finds {MARGIN:.0%} in 90 of 100 at 2 % noise: {fixed} pairs\n")
    print("| law | gain | noise | drift | faster | slower | no difference | undecided | pairs |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- |")
    for law in LAWS:
        for gain, deviation, drift in (
            (1.0, 0.02, 0.0), (1.0, 0.02, 0.1), (1.0, 0.005, 0.0),
            (1.03, 0.02, 0.0), (1.03, 0.02, 0.1), (1.01, 0.02, 0.0), (0.97, 0.02, 0.0),
        ):  # fmt: skip
            generator = np.random.default_rng(1)
            counts: Counter[Decision] = Counter()
            pairs = []
            for _ in range(races):
                logs = noise_of(law, generator, deviation)
                times = np.arange(2 * MOST_PAIRS).reshape(-1, 2) / (2 * MOST_PAIRS)
                logs += drift * np.sin(2 * math.pi * generator.permuted(times, axis=1))
                decision, count = race(logs + np.array([0.0, math.log(gain)]))
                counts[decision] += 1
                pairs.append(count)
            low, middle, high = np.percentile(pairs, [10, 50, 90])
            shown = " | ".join(str(counts[decision]) for decision in (
                Decision.FASTER, Decision.SLOWER, Decision.NO_DIFFERENCE, Decision.UNDECIDED
            ))  # fmt: skip
            print(
                f"| {law} | {gain - 1:+.0%} | {deviation:.1%} | {drift:.0%} | {shown} | "
                f"{middle:.0f} ({low:.0f} to {high:.0f}) |"
            )


if __name__ == "__main__":
    main()
