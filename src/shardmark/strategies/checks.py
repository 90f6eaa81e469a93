"""Conditions that several strategies share.  Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardmark.core.errors import StrategyUnavailable

if TYPE_CHECKING:
    from shardmark.core.machine import Machine
    from shardmark.core.recipe import Recipe


def check_machine(
    strategy: str,
    devices: int,
    machine: Machine,
    recipe: Recipe,
    *,
    offload_instead: str | None = "fsdp or zero-2",
) -> None:
    """Raise `StrategyUnavailable` for missing devices, and for a recipe that needs CUDA devices.

    Ranks share the cores of a CPU.  `offload_instead` is what to use for CPU offload; None where
    the strategy can.
    """
    on_cpu = machine.device_type != "cuda"
    if not on_cpu and devices > machine.device_count:
        fewer = f"use at most {machine.device_count} ranks, or " if machine.device_count else ""
        raise StrategyUnavailable(
            strategy,
            f"it needs {devices} CUDA devices and this machine offers {machine.device_count}",
            f"{fewer}set device: cpu",
        )
    if recipe.cpu_offload and offload_instead is not None:
        raise StrategyUnavailable(
            strategy,
            "it has no CPU offload: parameters and optimizer state stay on the device",
            f"set recipe.cpu_offload to false, or use {offload_instead}",
        )
    if recipe.cpu_offload and on_cpu:
        raise StrategyUnavailable(
            strategy,
            "CPU offload needs a CUDA device to offload from",
            "set recipe.cpu_offload to false",
        )
