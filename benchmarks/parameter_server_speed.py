"""What a parameter server costs beside the same sends, receives and computation alone.

    python benchmarks/parameter_server_speed.py [--pairs 5] [--steps 25] [--no-optimizer] [--small]

Step time of `ps-sync` over that of `bare_server.py`, ResNet-18 on digits, 2 workers and 1 server,
with the same batch, buckets and threads, in alternating order.  The bare server averages and
optimizes, as a parameter server must; `--no-optimizer` adds a row against one that only receives
and sends.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from recording import Table, options_of, spread, store, surroundings
from sides import (
    GLOBAL_BATCH,
    WARMUP_STEPS,
    Shardmark,
    add_sources_to_path,
    experiment_of,
    metric,
    run_of,
    run_script,
)

NAME = "parameter_server_speed"
WORKERS, SERVERS = 2, 1
RANKS = WORKERS + SERVERS
MOST_RATIO = 1.15
BAR = f"Bar: the median of ps-sync / bare, of step times, is at most {MOST_RATIO}"
BARE = {"bare": (), "passing": ("--no-optimizer",)}
DOES = {
    "bare": "sends, receives, computation, averaging, SGD",
    "passing": "sends, receives, computation",
}


def experiment(steps: int, repeats: int) -> dict[str, Any]:
    mapping = experiment_of(["ps-sync"], steps, repeats, WARMUP_STEPS)
    mapping["matrix"]["world_size"] = [WORKERS]
    return mapping


def check_same_buckets() -> None:
    """The bare script cuts its buckets itself; they must be those of the strategy."""
    from torchvision.models import resnet18

    from bare_loop import BUCKET_MB
    from bare_server import buckets_of
    from shardmark.strategies.parameter_server.buckets import partition_parameters

    model = resnet18(num_classes=10)
    (ours,) = partition_parameters(
        model, servers=SERVERS, bucket_bytes=BUCKET_MB * 2**20, wire="fp32"
    )
    theirs = [sum(parameter.numel() for parameter in bucket) for bucket in buckets_of(model)]
    assert [bucket.elements for bucket in ours] == theirs, (ours, theirs)


def threads_per_rank() -> int:
    """As a trial shares the cores out, servers included."""
    return max(1, len(os.sched_getaffinity(0)) // RANKS)


def step_seconds(run: Shardmark, side: str, pair: int, steps: int) -> float:
    """All ranks' samples over the slowest rank's window, on both sides."""
    if side == "shardmark":
        result = run.trial("ps-sync", pair)
        assert {rank.threads for rank in result.ranks} == {threads_per_rank()}
        return GLOBAL_BATCH / metric(result, "samples_per_second")
    bare = run_script(
        "bare_server.py",
        *("--steps", str(steps), "--warmup", str(WARMUP_STEPS)),
        *("--global-batch", str(GLOBAL_BATCH)),
        *BARE[side],
        ranks=RANKS,
        threads=threads_per_rank(),
    )
    return GLOBAL_BATCH / bare.samples_per_second


def measure_pair(run: Shardmark, others: Sequence[str], pair: int, steps: int) -> dict[str, Any]:
    sides = ("shardmark", *others)
    sides = sides if pair % 2 == 0 else sides[::-1]
    found = {side: step_seconds(run, side, pair, steps) for side in sides}
    ratios = {side: found["shardmark"] / found[side] for side in others}
    print(
        f"pair {pair}: "
        + ", ".join(f"{side} {found[side]:.4f} s/step" for side in ("shardmark", *others))
        + "".join(f", shardmark / {side} {ratio:.4f}" for side, ratio in ratios.items()),
        flush=True,
    )
    return {"step_seconds": found, "first": sides[0], "ratios": ratios}


def main() -> None:
    parser = options_of(NAME, __doc__)
    parser.add_argument("--pairs", type=int)
    parser.add_argument("--steps", type=int, help="of each training, the 5 of the warm-up included")
    parser.add_argument(
        "--no-optimizer", action="store_true", help="also against a server that only passes on"
    )
    options = parser.parse_args()
    pairs = options.pairs or (1 if options.small else 5)
    steps = options.steps or (10 if options.small else 25)
    others = ("bare", "passing") if options.no_optimizer else ("bare",)
    add_sources_to_path()
    check_same_buckets()
    around = surroundings()
    with run_of(experiment(steps, pairs)) as run:
        found = [measure_pair(run, others, pair, steps) for pair in range(pairs)]
    ratios = {side: spread([one["ratios"][side] for one in found]) for side in others}
    seconds = {
        side: spread([one["step_seconds"][side] for one in found])
        for side in ("shardmark", *others)
    }
    store(
        NAME,
        options=options,
        around=around,
        bar=BAR,
        holds=ratios["bare"]["median"] <= MOST_RATIO,
        table=Table(
            columns=(
                *("bare side", "ps-sync s/step", "bare s/step"),
                *("ratio: median", "min", "max", "IQR", "pairs"),
            ),
            rows=tuple(
                (
                    DOES[side],
                    f"{seconds['shardmark']['median']:.4f}",
                    f"{seconds[side]['median']:.4f}",
                    *(f"{ratio[key]:.3f}" for key in ("median", "min", "max")),
                    f"{ratio['interquartile_range']:.3f}",
                    str(pairs),
                )
                for side, ratio in ratios.items()
            ),
            notes=(
                f"ResNet-18 on digits, global batch {GLOBAL_BATCH}, {WORKERS} workers and "
                f"{SERVERS} server with {threads_per_rank()} thread(s) each. A bare worker sends "
                "when its backward pass is over. The bar is about the first row.",
            ),
        ),
        numbers={
            "steps": steps,
            "threads": threads_per_rank(),
            "step_seconds": seconds,
            "ratios": ratios,
            "pairs": found,
        },
    )


if __name__ == "__main__":
    main()
