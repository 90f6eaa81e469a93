"""Table of slow commands: what makes each slow, and how much; and of commands with no fault."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Slow:
    """A command with a fault of a known kind, rank and amount (milliseconds of a step).

    Without `amount_ms`, `amount_from`, the command without the fault, is measured beside it.
    `link` is the rate of the loopback device in a network namespace, in words of `tc`.
    """

    name: str
    command: str
    kind: str = ""
    ranks: int = 2
    rank: int | None = None
    place: str | None = None
    amount_ms: float | None = None
    amount_from: str = ""
    link: str | None = None

    def launched(self) -> list[str]:
        """Words of the command with its launcher."""
        script, *rest = self.command.split()
        return ["torchrun", "--nproc-per-node", str(self.ranks), str(FOLDER / script), *rest]


def _slow(kind: str, name: str, good: str, fault: str, facts: dict[str, Any]) -> Slow:
    """A case whose command is the good one and `--way` with the words of the fault."""
    facts = dict(facts)
    rank, way = facts.get("rank"), facts.pop("good_way", None)
    at = "" if rank is None else f" --on-rank {rank}"
    added = "" if fault.startswith("--") else f"--fault {kind} --way "
    command = f"{good} {added}{fault}{at}".rstrip()
    twin = good if way is None else f"{good} {added}{way}{at}"
    place = "faults.py" if kind in {"slow_backward", "host_bound"} else good.partition(" ")[0]
    facts |= {"place": place, "amount_from": "" if "amount_ms" in facts else twin}
    return Slow(kind=kind, name=name, command=command, **facts)


FSDP, LIGHTNING = "loop.py --strategy fsdp", "lightning_loop.py"
MICRO = "--batch 1 --accumulate 12"
TOGETHER: dict[str, Any] = {"good_way": "together"}
_ROWS: dict[str, tuple[tuple[str, str, str, dict[str, Any]], ...]] = {
    "slow_input": (
        ("items", "loop.py", "item --amount-ms 4", {"amount_ms": 32}),
        ("collate", "accelerated.py", "collate --amount-ms 30", {"rank": 1, "amount_ms": 30}),
        ("two workers", f"{LIGHTNING} --workers 2", "item --amount-ms 30", {}),
        ("get_batch", "accumulate.py", "get_batch --amount-ms 30", {"ranks": 4}),
        ("generator", "accumulate.py --data generator", "get_batch --amount-ms 15",
         {"rank": 0, "amount_ms": 30}),
    ),
    "slow_backward": (
        ("hook in DDP", "loop.py", "hook --amount-ms 25", {"rank": 1, "amount_ms": 25}),
        ("function in FSDP2", FSDP, "function --amount-ms 30", {"rank": 0, "amount_ms": 30}),
        ("hook in own loop", "accumulate.py", "hook --amount-ms 15", {"rank": 1, "amount_ms": 30}),
        ("function in Trainer", "trainer.py", "function --amount-ms 40",
         {"rank": 0, "amount_ms": 40}),
        ("hook in Lightning", LIGHTNING, "hook --amount-ms 60", {"rank": 2, "ranks": 3}),
    ),
    "slow_core": (  # the way is the number of processes that spin on the core
        ("core in DDP", "loop.py", "1", {"rank": 1, "good_way": 0}),
        ("core in FSDP2", FSDP, "1", {"rank": 0, "good_way": 0}),
        ("core in own loop", "accumulate.py", "2", {"rank": 1, "good_way": 0}),
        ("core in Accelerate", "accelerated.py", "1", {"rank": 0, "good_way": 0}),
        ("core of three", "accelerated.py", "3", {"rank": 2, "ranks": 3, "good_way": 0}),
    ),
    "thin_link": (
        ("link in DDP", "loop.py", "--fault link", {"link": "400mbit"}),
        ("link in FSDP2", FSDP, "--fault link", {"link": "600mbit"}),
        ("link in own loop", "accumulate.py", "--fault link", {"link": "300mbit", "ranks": 3}),
        ("link in Accelerate", "accelerated.py", "--fault link", {"link": "300mbit"}),
        ("link in Lightning", LIGHTNING, "--fault link", {"link": "400mbit"}),
    ),
    "many_reductions": (
        ("by tensor", "accumulate.py --batch 2 --accumulate 1 --depth 8", "--reduce each",
         {"ranks": 4}),
        ("by micro-batch", f"accumulate.py {MICRO}", "--reduce micro", {}),
        ("no_sync missing in DDP", f"loop.py {MICRO}", "--sync all", {}),
        ("no_sync missing in Accelerate", f"accelerated.py {MICRO}", "--sync all", {}),
        ("norms for the log", f"{LIGHTNING} --norms own", "--norms all", {}),
    ),
    "unlike_rows": (
        ("long rows in DDP", "loop.py --batch 4", "rank", {"rank": 1}),
        ("lengths in FSDP2", FSDP, "vary", TOGETHER),
        ("long rows in own loop", "accumulate.py", "rank", {"rank": 0}),
        ("lengths in Trainer", "trainer.py", "vary", TOGETHER),
        ("long rows in Accelerate", "accelerated.py", "rank", {"rank": 2, "ranks": 3}),
    ),
    "between_steps": (
        ("evaluation in DDP", "loop.py", "evaluation", {}),
        ("evaluation in Trainer", "trainer.py", "evaluation", {}),
        ("checkpoint in DDP", "loop.py", "checkpoint", {}),
        ("checkpoint in Lightning", LIGHTNING, "checkpoint", {}),
        ("printed gradients", "accelerated.py", "print", {}),
    ),
    "host_bound": (
        ("rows in DDP", "loop.py", "rows", {}),
        ("items in FSDP2", FSDP, "item", {}),
        ("metric in own loop", "accumulate.py --batch 8", "metric", {}),
        ("metric in Trainer", "trainer.py", "metric", {}),
        ("items in Lightning", LIGHTNING, "item", {}),
    ),
}  # fmt: skip
SLOW = tuple(_slow(kind, *row) for kind, rows in _ROWS.items() for row in rows)

QUIET = tuple(
    Slow(name=f"{command} on {ranks} ranks", command=command, ranks=ranks)
    for ranks, command in (
        *((2, "loop.py"), (3, "loop.py"), (2, "loop.py --workers 2"), (2, FSDP), (4, FSDP)),
        *((2, "accumulate.py"), (2, "accumulate.py --data generator --accumulate 4")),
        *((2, "accelerated.py"), (2, "accelerated.py --accumulate 4"), (2, "trainer.py")),
        *((2, LIGHTNING), (2, f"{LIGHTNING} --workers 1")),
    )
)
