"""Times the search over all layouts of 16,384 ranks, the model being traced already.

The bar is one second.  The model is a GPT of 24 layers on bytes, its weights never made.
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import median
from time import perf_counter

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.recording import Table, options_of, store, surroundings

from shardmark.config.load import from_mapping
from shardmark.predict.hardware.catalogue import load_node
from shardmark.predict.layouts import searcher_of
from shardmark.predict.models import Models
from shardmark.predict.plan import GiB
from shardmark.predict.step import Factors
from shardmark.predict.timing import Constants
from shardmark.trials.matrix import cells_of_any_size

BAR_SECONDS = 1.0
REPEATS = 9
EXPERIMENT = {
    "name": "search",
    "workload": {
        "name": "language",
        "model": "gpt",
        "layers": 24,
        "width": 1024,
        "heads": 16,
        "dataset": "stdlib",
        "tokenizer": "bytes",
        "sequence_length": 1024,
    },
    "recipe": {"steps": 1, "optimizer": {"name": "adamw"}, "precision": "bf16"},
    "matrix": {"strategy": ["ddp"]},
}
BATCHES = (16_384, 65_536, 1_048_576)


def main() -> None:
    options = options_of("search", __doc__).parse_args()
    around = surroundings()
    node, nodes, models = load_node("dgx-h100"), 16 if options.small else 2048, Models()
    rows, numbers = [], {}
    for batch in BATCHES[: 1 if options.small else None]:
        experiment = from_mapping(EXPERIMENT, [f"recipe.global_batch={batch}"])
        (cell,), _ = cells_of_any_size(experiment)
        began = perf_counter()
        searcher = searcher_of(cell, node, nodes, models, constants=Constants(), factors=Factors())
        made_seconds = perf_counter() - began
        found = [searcher.search(node.card.memory_gib * GiB) for _ in range(REPEATS)]
        seconds = median(each.seconds for each in found)
        numbers[str(batch)] = {
            "layouts": found[0].searched,
            "seconds": [each.seconds for each in found],
            "traced_seconds": made_seconds,
            "front": len(found[0].front),
        }
        rows.append(
            (
                f"{batch:,}",
                f"{found[0].searched:,}",
                str(len(found[0].front)),
                f"{seconds:.2f} s",
                f"{max(each.seconds for each in found):.2f} s",
                f"{made_seconds:.0f} s",
            )
        )
    worst = max(median(each["seconds"]) for each in numbers.values())
    store(
        "search",
        options=options,
        around=around,
        bar=f"median at most {BAR_SECONDS:g} s for 16,384 ranks",
        holds=worst <= BAR_SECONDS,
        table=Table(
            columns=("batch", "layouts", "on the front", "median", "slowest", "tracing"),
            rows=tuple(rows),
        ),
        numbers=numbers,
    )


if __name__ == "__main__":
    main()
