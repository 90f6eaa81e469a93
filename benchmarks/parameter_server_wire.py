"""What parameter servers send: bytes on the wire against gradients out plus parameters in.

    python benchmarks/parameter_server_wire.py [--pairs 3] [--strategies ps-sync] [--small]

ResNet-18 in fp32 on digits, 2 workers and 1 server.  Bytes per worker and step are counted in two
ways: those that a trial recorded (push_bytes + pull_bytes), and those that the loopback interface
sent during a long trial less those during a short one, so that what does not depend on steps
cancels.  The kernel counts whole packets, and everybody's on the machine.  To be alone there:

    unshare -rn sh -c 'ip link set lo up && python benchmarks/parameter_server_wire.py'
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from recording import Table, options_of, spread, store, surroundings
from sides import Shardmark, add_sources_to_path, experiment_of, metric, run_of

NAME = "parameter_server_wire"
STRATEGIES = ("ps-sync", "ps-async", "ps-bounded")
WORKERS = 2
GLOBAL_BATCH = 16
STEPS = (5, 45)
MOST_OFF = 0.02
BAR = f"Bar: recorded and sent bytes are 1 +/- {MOST_OFF} of gradients out plus parameters in"
IDLE_SECONDS = 3
MB = 1e6


def experiment(strategies: Sequence[str], *, steps: int, repeats: int) -> dict[str, Any]:
    """One that sends nothing but what training needs."""
    mapping = experiment_of(strategies, steps, repeats, warmup_steps=0)
    mapping["matrix"]["world_size"] = [WORKERS]
    mapping["recipe"]["global_batch"] = GLOBAL_BATCH
    mapping["measure"]["probe"] = False
    return mapping


def defined_bytes() -> int:
    """Gradients out plus parameters in: fp32 twice."""
    from torchvision.models import resnet18

    return 2 * sum(4 * parameter.numel() for parameter in resnet18(num_classes=10).parameters())


def loopback_bytes() -> int:
    """Sent over the loopback interface since it came up; the same bytes count as received, too."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, fields = line.partition(":")
        if name.strip() == "lo":
            return int(fields.split()[8])
    raise SystemExit("/proc/net/dev shows no interface lo")


def idle_bytes_per_second() -> float:
    before, started = loopback_bytes(), time.monotonic()
    time.sleep(IDLE_SECONDS)
    return (loopback_bytes() - before) / (time.monotonic() - started)


def counted_trial(run: Shardmark, strategy: str, pair: int) -> dict[str, float]:
    before = loopback_bytes()
    result = run.trial(strategy, pair)
    return {
        "loopback_bytes": loopback_bytes() - before,
        "recorded_bytes": metric(result, "push_bytes") + metric(result, "pull_bytes"),
        "total_seconds": result.total_seconds,
    }


def wire_pair(runs: Sequence[Shardmark], strategy: str, pair: int) -> dict[str, Any]:
    found: dict[int, dict[str, float]] = {}
    for which in (0, 1) if pair % 2 == 0 else (1, 0):
        found[which] = counted_trial(runs[which], strategy, pair)
    short, long = found[0], found[1]
    steps = (STEPS[1] - STEPS[0]) * WORKERS
    sent = (long["loopback_bytes"] - short["loopback_bytes"]) / steps
    print(
        f"{strategy} pair {pair}: recorded {long['recorded_bytes'] / MB:.2f} MB, "
        f"sent over lo {sent / MB:.2f} MB per worker and step",
        flush=True,
    )
    return {"short": short, "long": long, "sent_bytes": sent}


def main() -> None:
    parser = options_of(NAME, __doc__)
    parser.add_argument("--pairs", type=int)
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES)
    options = parser.parse_args()
    add_sources_to_path()
    strategies = options.strategies or (STRATEGIES[:1] if options.small else STRATEGIES)
    pairs = options.pairs or (1 if options.small else 3)
    around = surroundings()
    expected = defined_bytes()
    idle = [idle_bytes_per_second()]
    measured: dict[str, list[dict[str, Any]]] = {name: [] for name in strategies}
    short, long = (experiment(strategies, steps=n, repeats=pairs) for n in STEPS)
    with run_of(short) as shorter, run_of(long) as longer:
        for pair in range(pairs):
            for name in strategies:
                measured[name].append(wire_pair((shorter, longer), name, pair))
    idle.append(idle_bytes_per_second())
    ratios = {
        name: {
            "recorded": median(one["long"]["recorded_bytes"] for one in found) / expected,
            "sent": spread([one["sent_bytes"] / expected for one in found]),
        }
        for name, found in measured.items()
    }
    rows = tuple(
        (
            name,
            f"{expected / MB:.2f}",
            f"{ratio['recorded'] * expected / MB:.2f}",
            f"{ratio['sent']['median'] * expected / MB:.2f}",
            f"{ratio['recorded']:.4f}",
            *(f"{ratio['sent'][key]:.4f}" for key in ("median", "min", "max")),
            str(pairs),
        )
        for name, ratio in ratios.items()
    )
    store(
        NAME,
        options=options,
        around=around,
        bar=BAR,
        holds=all(
            abs(value - 1) <= MOST_OFF
            for ratio in ratios.values()
            for value in (ratio["recorded"], ratio["sent"]["median"])
        ),
        table=Table(
            columns=(
                *("strategy", "defined MB", "recorded MB", "sent over lo MB"),
                *("recorded ratio", "sent ratio: median", "min", "max", "pairs"),
            ),
            rows=rows,
            notes=(
                "MB (10^6 bytes) per worker and step; sent: trials of "
                f"{STEPS[1]} steps less those of {STEPS[0]}. On lo there are also, and "
                "count: headers of TCP, IP and Ethernet, acknowledgements, gloo's and our own "
                "message headers, the keep-alive of torchrun's store, and other programs: "
                f"{idle[0] / MB:.3f} MB/s before and {idle[1] / MB:.3f} MB/s after the trials.",
            ),
        ),
        numbers={
            "defined_bytes": expected,
            "steps": STEPS,
            "global_batch": GLOBAL_BATCH,
            "idle_bytes_per_second": idle,
            "ratios": ratios,
            "pairs": measured,
        },
    )


if __name__ == "__main__":
    main()
