"""What measuring costs: samples per second of a Shardmark trial over those of a bare loop.

    python benchmarks/overhead.py [--pairs 7] [--steps 35] [--strategies single ddp] [--small]

Pairs of a trial with all metrics on and of `bare_loop.py`, in alternating order (A B, B A, ...).
"""

from __future__ import annotations

from typing import Any

from recording import Table, options_of, spread, store, surroundings
from sides import Shardmark, add_sources_to_path, metric, run_bare, shardmark_run

NAME = "overhead"
STRATEGIES = ("single", "ddp", "fsdp", "zero-1")
LEAST_RATIO = 0.99
BAR = f"Bar: the median of shardmark / bare is at least {LEAST_RATIO} for every strategy"


def check_same_settings() -> None:
    """The bare loop writes DeepSpeed's options out; they must be those of the strategy."""
    import torch

    from bare_loop import SGD, ZERO
    from shardmark.core.recipe import Optimizer, Recipe
    from shardmark.strategies import build_strategy
    from shardmark.strategies.base import RankContext

    recipe = Recipe(global_batch=64, steps=1, optimizer=Optimizer(name="sgd", **SGD))
    process = RankContext(
        rank=0, world_size=2, local_rank=0, local_world_size=2, device=torch.device("cpu")
    )
    ours = build_strategy("zero-1", {}).config(recipe, process)
    assert ours == ZERO, f"zero-1 is set up as {ours}, the bare loop as {ZERO}"


def measure_pair(run: Shardmark, strategy: str, pair: int, steps: int) -> dict[str, Any]:
    found = {}
    sides = ("shardmark", "bare") if pair % 2 == 0 else ("bare", "shardmark")
    for side in sides:
        if side == "bare":
            found[side] = run_bare(strategy, steps=steps).samples_per_second
        else:
            found[side] = metric(run.trial(strategy, pair), "samples_per_second")
    ratio = found["shardmark"] / found["bare"]
    print(
        f"{strategy} pair {pair}: shardmark {found['shardmark']:.1f}, "
        f"bare {found['bare']:.1f} samples/s, ratio {ratio:.4f}",
        flush=True,
    )
    return {**found, "first": sides[0], "ratio": ratio}


def main() -> None:
    parser = options_of(NAME, __doc__)
    parser.add_argument("--pairs", type=int)
    parser.add_argument("--steps", type=int, help="of each training, the 5 of the warm-up included")
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=STRATEGIES)
    options = parser.parse_args()
    pairs = options.pairs or (2 if options.small else 7)
    steps = options.steps or (15 if options.small else 35)
    add_sources_to_path()
    check_same_settings()
    around = surroundings()
    measured: dict[str, list[dict[str, Any]]] = {name: [] for name in options.strategies}
    with shardmark_run(options.strategies, steps=steps, repeats=pairs) as run:
        for pair in range(pairs):
            for name in options.strategies:
                measured[name].append(measure_pair(run, name, pair, steps))
    ratios = {name: spread([one["ratio"] for one in found]) for name, found in measured.items()}
    medians = {
        side: {n: spread([one[side] for one in found])["median"] for n, found in measured.items()}
        for side in ("shardmark", "bare")
    }
    table = Table(
        columns=(
            *("strategy", "shardmark samples/s", "bare samples/s"),
            *("ratio: median", "min", "max", "IQR", "pairs"),
        ),
        rows=tuple(
            (
                name,
                f"{medians['shardmark'][name]:.1f}",
                f"{medians['bare'][name]:.1f}",
                f"{ratio['median']:.3f}",
                f"{ratio['min']:.3f}",
                f"{ratio['max']:.3f}",
                f"{ratio['interquartile_range']:.3f}",
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
        holds=all(ratio["median"] >= LEAST_RATIO for ratio in ratios.values()),
        table=table,
        numbers={"steps": steps, "ratios": ratios, "pairs": measured},
    )


if __name__ == "__main__":
    main()
