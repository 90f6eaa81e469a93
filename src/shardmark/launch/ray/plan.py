"""What the engine `ray` asks a cluster for.  Imports neither torch nor Ray."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from shardmark.config.engines import RayOptions
from shardmark.core.errors import InputError
from shardmark.launch.seats import seats_of
from shardmark.trials.trial import Trial


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What the trials take of one node at most."""

    ranks: int
    devices: int
    """Ranks that use a CUDA device where there are any; a parameter server may do without."""


def rooms(trials: Iterable[Trial]) -> tuple[Room, ...]:
    """Of each node.  A rank of several devices counts as so many.

    `InputError` for a trial that is to be restarted: that is done by PyTorch's elastic launcher,
    which has no part here.
    """
    found: list[Room] = []
    for trial in trials:
        if trial.limits.max_restarts:
            raise InputError(
                "limits.max_restarts",
                f"{trial.limits.max_restarts}, and the engine ray starts no rank anew",
                "set it to 0, or use the engine torchrun or slurm",
            )
        strategy = trial.built_strategy
        for node, seats in enumerate(seats_of(trial)):
            at_least = trial.world_size // trial.nodes
            using = [strategy.rank_device(rank, trial.world_size, "cuda") for rank in seats]
            room = Room(ranks=max(len(seats), at_least), devices=max(using.count("cuda"), at_least))
            if node == len(found):
                found.append(room)
            found[node] = Room(
                ranks=max(room.ranks, found[node].ranks),
                devices=max(room.devices, found[node].devices),
            )
    return tuple(found)


def bundles(options: RayOptions, asked: Sequence[Room], gpus: int) -> list[dict[str, float]]:
    """What the placement group reserves: for each node, all that its ranks need there."""
    found = []
    for room in asked:
        amounts = {"CPU": options.cpus_per_rank * room.ranks, "GPU": float(gpus * room.devices)}
        amounts |= {name: amount * room.ranks for name, amount in options.resources.items()}
        found.append({name: amount for name, amount in amounts.items() if amount})
    return found


def gpus_of_a_rank(
    options: RayOptions, device: str, asked: Sequence[Room], nodes: Sequence[Mapping[str, float]]
) -> int:
    """Whether a rank gets a GPU, with the resources of the cluster's nodes; `InputError` if not."""
    if device == "cuda" and options.gpus_per_rank == 0:
        raise InputError("engine.gpus_per_rank", "0, and device is cuda", "set 1, or device: cpu")
    if device == "cpu" or options.gpus_per_rank == 0:
        return 0
    there = sorted((node.get("GPU", 0.0) for node in nodes), reverse=True)
    wanted = sorted((room.devices for room in asked), reverse=True)
    enough = len(there) >= len(wanted) and all(
        has >= needs for has, needs in zip(there, wanted, strict=False)
    )
    return int(enough or device == "cuda" or options.gpus_per_rank == 1)
