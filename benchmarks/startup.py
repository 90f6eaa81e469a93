"""How soon training starts: a further trial of a run against a bare `torchrun` script.

    python benchmarks/startup.py [--pairs 5] [--strategies ddp fsdp] [--small]

Seconds from the launch to the first step of the last rank.  The bare script imports torch,
torchvision and, for ZeRO, DeepSpeed, whose operator is compiled before; the run has had its first
trial.  Both start fresh processes and a fresh process group each time.  Order A B, B A, ...
"""

from __future__ import annotations

from typing import Any

from recording import Table, options_of, spread, store, surroundings
from sides import Shardmark, add_sources_to_path, metric, run_bare, shardmark_run

NAME = "startup"
STRATEGIES = ("ddp", "fsdp", "zero-1")
MOST_RATIO = 0.25
BAR = f"Bar: the median of shardmark / bare is at most {MOST_RATIO} for every strategy"
STEPS = 2
FIRST = 0
"""Repeat that is the run's first trial of a strategy, left out."""


def measure_pair(run: Shardmark, strategy: str, pair: int) -> dict[str, Any]:
    found = {}
    sides = ("shardmark", "bare") if pair % 2 == 0 else ("bare", "shardmark")
    for side in sides:
        if side == "bare":
            found[side] = run_bare(strategy, steps=STEPS).startup_seconds
        else:
            found[side] = metric(run.trial(strategy, FIRST + 1 + pair), "startup_seconds")
    ratio = found["shardmark"] / found["bare"]
    print(
        f"{strategy} pair {pair}: shardmark {found['shardmark']:.2f} s, "
        f"bare {found['bare']:.2f} s, ratio {ratio:.3f}",
        flush=True,
    )
    return {**found, "first": sides[0], "ratio": ratio}


def main() -> None:
    parser = options_of(NAME, __doc__)
    parser.add_argument("--pairs", type=int)
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=STRATEGIES)
    options = parser.parse_args()
    pairs = options.pairs or (1 if options.small else 5)
    add_sources_to_path()
    around = surroundings()
    measured: dict[str, list[dict[str, Any]]] = {name: [] for name in options.strategies}
    with shardmark_run(
        options.strategies, steps=STEPS, repeats=1 + pairs, warmup_steps=STEPS - 1
    ) as run:
        for name in options.strategies:
            run.trial(name, FIRST)
            run_bare(name, steps=STEPS)  # fills the page cache and DeepSpeed's compiled operators
        for pair in range(pairs):
            for name in options.strategies:
                measured[name].append(measure_pair(run, name, pair))
    ratios = {name: spread([one["ratio"] for one in found]) for name, found in measured.items()}
    medians = {
        side: {n: spread([one[side] for one in found])["median"] for n, found in measured.items()}
        for side in ("shardmark", "bare")
    }
    table = Table(
        columns=("strategy", "shardmark s", "bare s", "ratio: median", "min", "max", "pairs"),
        rows=tuple(
            (
                name,
                f"{medians['shardmark'][name]:.2f}",
                f"{medians['bare'][name]:.2f}",
                f"{ratio['median']:.3f}",
                f"{ratio['min']:.3f}",
                f"{ratio['max']:.3f}",
                str(pairs),
            )
            for name, ratio in ratios.items()
        ),
    )
    store(
        NAME,
        options=options,
        around=around,
        bar=BAR,
        holds=all(ratio["median"] <= MOST_RATIO for ratio in ratios.values()),
        table=table,
        numbers={"ratios": ratios, "pairs": measured},
    )


if __name__ == "__main__":
    main()
