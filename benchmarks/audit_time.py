"""How long a first audit takes: `shardmark audit` on 2 ranks against the script in one process.

    python benchmarks/audit_time.py [--pairs 9] [--small]

The script is the right form of `tests/zoo/token_means.py`, run to its end in one process without a
launcher: nearly all of that is its start-up.  The order of the two sides alternates.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Any

from harness import BENCHMARKS, Table, options_of, spread, store, surroundings

NAME = "audit_time"
MOST_RATIO = 2.5
BAR = f"Bar: the median of audit / script is at most {MOST_RATIO}"
SCRIPT = [str(BENCHMARKS.parent / "tests" / "zoo" / "token_means.py"), "--right"]
AUDIT = [sys.executable, "-m", "shardmark", "audit", "--", "torchrun", "--nproc-per-node", "2"]
ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
SIDES = {"audit": [*AUDIT, *SCRIPT], "script": [sys.executable, *SCRIPT]}


def seconds_of(side: str) -> float:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if side == "script":
        environment |= {**ALONE, "MASTER_PORT": "29517"}
    began_at_seconds = time.monotonic()
    subprocess.run(SIDES[side], env=environment, check=True, capture_output=True)
    return time.monotonic() - began_at_seconds


def main() -> None:
    parser = options_of(NAME, __doc__)
    parser.add_argument("--pairs", type=int)
    options = parser.parse_args()
    around = surroundings()
    pairs: list[dict[str, Any]] = []
    for number in range(-1, options.pairs or (1 if options.small else 9)):
        order = list(SIDES)[:: 1 if number % 2 else -1]
        pair = {side: seconds_of(side) for side in order}
        if number >= 0:  # the first pair fills the page cache
            pairs.append({**pair, "ratio": pair["audit"] / pair["script"]})
            print(pairs[-1], flush=True)
    ratio = spread([pair["ratio"] for pair in pairs])
    medians = [f"{spread([pair[side] for pair in pairs])['median']:.1f}" for side in SIDES]
    figures = [f"{ratio[key]:.2f}" for key in ("median", "min", "max")]
    store(
        NAME,
        options=options,
        around=around,
        bar=BAR,
        holds=ratio["median"] <= MOST_RATIO,
        table=Table(
            columns=("audit s", "script s", "ratio: median", "min", "max", "pairs"),
            rows=((*medians, *figures, str(len(pairs))),),
        ),
        numbers={"ratio": ratio, "pairs": pairs},
    )


if __name__ == "__main__":
    main()
