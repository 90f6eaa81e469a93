"""Conditions that several strategies share.  Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardmark.core.errors import StrategyUnavailable

if TYPE_CHECKING:
    from shardmark.core.machine import Machine
    from shardmark.core.recipe import Recipe


def check_devices(strategy: str, needed: int, machine: Machine) -> None:
    """One CUDA device a rank; on the CPU ranks share the cores."""
    if machine.device_type == "cuda" and needed > machine.device_count:
        fewer = f"use at most {machine.device_count} ranks, or " if machine.device_count else ""
        raise StrategyUnavailable(
            strategy,
            f"it needs {needed} CUDA devices and this machine offers {machine.device_count}",
            f"{fewer}set device: cpu",
        )


def check_precision(strategy: str, machine: Machine, recipe: Recipe) -> None:
    if recipe.precision == "fp16" and machine.device_type != "cuda":
        raise StrategyUnavailable(
            strategy,
            "fp16 with loss scaling needs a CUDA device",
            "set recipe.precision to bf16 or fp32",
        )


def check_no_offload(strategy: str, recipe: Recipe, instead: str = "fsdp or zero-2") -> None:
    if recipe.cpu_offload:
        raise StrategyUnavailable(
            strategy,
            "it has no CPU offload: parameters and optimizer state stay on the device",
            f"set recipe.cpu_offload to false, or use {instead}",
        )


def check_offload_device(strategy: str, machine: Machine, recipe: Recipe) -> None:
    if recipe.cpu_offload and machine.device_type != "cuda":
        raise StrategyUnavailable(
            strategy,
            "CPU offload needs a CUDA device to offload from",
            "set recipe.cpu_offload to false",
        )
