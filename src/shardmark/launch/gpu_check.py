"""Tries a new machine's GPUs as a run will use them: kernels, copies, a collective, strategies."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from shardmark.analysis.network.links import link_summary, with_fits
from shardmark.config.load import from_mapping
from shardmark.core.errors import ShardmarkError
from shardmark.core.machine import Machine
from shardmark.core.peaks import peak_flops_per_second
from shardmark.core.scratch import scratch_folder
from shardmark.launch.controller import verify_experiment
from shardmark.launch.listener import ProgressListener
from shardmark.measure.network.probe import probe_network
from shardmark.measure.system.environment import relevant_variables
from shardmark.measure.system.gpu_probe import Copy, Kernel, probe_gpus
from shardmark.measure.system.gpus import (
    CudaDevice,
    all_cuda_devices,
    occupation,
    visible_cuda_devices,
)
from shardmark.measure.system.machine_checks import (
    Check,
    State,
    device_checks,
    host_checks,
    problems,
    software_checks,
)
from shardmark.results.verification import Verdict, accepted, verdict_text

LINK_SECONDS = 3.0
STRATEGY_SECONDS = 60.0
"""For the steps of one strategy: longer, and it hangs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """What was found of one matter."""

    title: str
    checks: tuple[Check, ...]


def gpu_sections(
    here: Machine, strategies: Mapping[str, int], listener: ProgressListener
) -> list[Section]:
    """What the machine is, what its GPUs do, and whether strategies train the same on them.

    `strategies` has those that can run here, each with a number of ranks.  What needs what has
    failed is left out.  Nothing names a host or a folder.
    """
    return [
        Section(title=title, checks=tuple(map(impersonal, checks)))
        for title, checks in _sections(here, strategies, listener)
    ]


def _sections(
    here: Machine, strategies: Mapping[str, int], listener: ProgressListener
) -> Iterator[tuple[str, Iterable[Check]]]:
    there = all_cuda_devices()
    device_found, *driver = device_checks(here, there)
    if here.device_type != "cuda":
        yield "GPUs", [replace(device_found, state=State.MISSING)]
        return
    variables = [f"{name}={value}" for name, value in relevant_variables(os.environ).items()]
    told = [_fine("variables", ", ".join(variables))] if variables else []
    yield "machine", [*software_checks(), *driver, *host_checks(here), *told]
    devices = visible_cuda_devices(there)
    links = [_fine("links by NVML", f"{by}: {' '.join(of)}") for by, of in there.links.items()]
    yield "GPUs", [*_devices(devices), *links]
    listener.doing("a kernel on each GPU, and copies")
    tried = list(_kernels_and_copies())
    listener.doing("an all-reduce over all GPUs")
    tried.append(_collective(len(devices)))
    yield "measured", tried
    if not problems(tried):
        title = "strategies, a few steps held against one process that plays all ranks"
        yield title, _strategies(strategies, listener)


def impersonal(check: Check) -> Check:
    """The check without the machine's name, and without folders: it may be made public."""
    host, home = platform.node(), str(Path.home())

    def cleaned(text: str) -> str:
        if len(home) > 1:
            text = text.replace(home, "~")
        text = _FOLDERS.sub("", text)
        return re.sub(rf"\b{re.escape(host)}\b", "HOST", text) if host else text

    remedy = None if check.remedy is None else cleaned(check.remedy)
    return replace(check, found=cleaned(check.found), remedy=remedy)


_FOLDERS = re.compile(
    r"(?<![\w./])(?:~/(?:[^\s/:'\",]+/)*|/(?!/|(?:dev|proc|sys)/)(?:[^\s/:'\",]+/)+)"
)
"""Those of an absolute path; its last part stays."""


def _devices(devices: Sequence[CudaDevice]) -> Iterator[Check]:
    for index, device in enumerate(devices):
        capability = None if device.capability is None else "{}.{}".format(*device.capability)
        facts: dict[str, float | str | None] = {
            "{}": device.name,
            "{:.0f} GiB": _scaled(device.memory_bytes, 2**-30),
            "compute capability {}": capability,
            "PCIe {}": device.pcie,
            "power limit {:.0f} W": device.power_limit_watts,
            "of {:.0f} W by default": device.default_power_limit_watts,
            "clock {:.0f} MHz": _scaled(device.sm_clock_hertz, 1e-6),
            "of at most {:.0f} MHz": _scaled(device.highest_sm_clock_hertz, 1e-6),
            "NUMA node {}": device.numa_node,
            "{} NVLinks up": device.nvlinks,
        }
        known = (form.format(value) for form, value in facts.items() if value is not None)
        yield _fine(f"GPU {index}", ", ".join(known))
        if told := occupation(device.processes, device.memory_used_bytes):
            remedy = "end them, or choose other GPUs with CUDA_VISIBLE_DEVICES"
            yield Check(name=f"GPU {index}", state=State.NOTE, found=told, remedy=remedy)


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _kernels_and_copies() -> Iterator[Check]:
    try:
        probe = probe_gpus()
    except ShardmarkError as error:
        yield _failed(
            "kernel", str(error), "see whether `nvidia-smi` answers, and the driver's log"
        )
        return
    libraries = ", ".join(f"{name} {version}" for name, version in probe.libraries)
    kernels = f"torch has kernels for {' '.join(probe.architectures)}"
    yield _fine("libraries", f"{libraries}; {kernels}")
    for kernel in probe.kernels:
        yield _kernel(kernel)
    groups: dict[str, list[Copy]] = {}
    for copy in probe.copies:
        groups.setdefault(re.sub(r"\d+", "GPU", _path(copy)), []).append(copy)
    for name, copies in groups.items():
        yield _copies(name, copies)


def _kernel(kernel: Kernel) -> Check:
    name = f"kernel, GPU {kernel.device}"
    if kernel.error is not None or kernel.flops_per_second is None:
        remedy = "compare the GPU's compute capability with torch's kernels, and test the GPU"
        return _failed(name, kernel.error or "it was not timed", remedy)
    words = f"right; {1e-12 * kernel.flops_per_second:.0f} TFLOP/s in {kernel.precision}"
    peak, source = peak_flops_per_second(kernel.name, kernel.precision)
    if peak is None:
        words += f"; {source}"
    else:
        words += f", {100 * kernel.flops_per_second / peak:.0f} % of the peak ({source})"
    return _fine(name, words)


def _copies(name: str, copies: Sequence[Copy]) -> Check:
    wrong = [f"{_path(copy)}: {copy.error}" for copy in copies if copy.error is not None]
    if wrong:
        remedy = "test without peer access: NCCL_P2P_DISABLE=1, or switch off IOMMU and ACS"
        return _failed(name, "; ".join(wrong), remedy)
    speeds = sorted((copy.bytes_per_second or 0.0, _path(copy)) for copy in copies)
    (slowest, slow), (fastest, fast) = speeds[0], speeds[-1]
    words = f"{1e-9 * slowest:.1f} GB/s ({slow})"
    if len(speeds) > 1:
        words += f" to {1e-9 * fastest:.1f} GB/s ({fast})"
    return _fine(name, words)


def _path(copy: Copy) -> str:
    ends = ("host" if end is None else str(end) for end in (copy.source, copy.target))
    return " to ".join(ends)


def _collective(gpus: int) -> Check:
    name = f"NCCL, {gpus} GPUs" if gpus > 1 else "NCCL, 1 GPU"
    try:
        record = with_fits(probe_network(gpus, device="cuda", seconds=LINK_SECONDS))
    except ShardmarkError as error:
        remedy = "run it again with NCCL_DEBUG=INFO, and look at the links above"
        return _failed(name, str(error), remedy)
    speed = f"; {link_summary(record)}" if gpus > 1 else ""
    return _fine(name, f"the sum is right{speed}")


def _strategies(strategies: Mapping[str, int], listener: ProgressListener) -> Iterator[Check]:
    experiment = from_mapping(
        {
            "name": "doctor-gpu",
            "workload": {"name": "classification", "model": "resnet18", "dataset": "digits"},
            "recipe": {
                "per_rank_batch": 16,
                "steps": 10,
                "optimizer": {"lr": 0.05, "momentum": 0.9},
            },
            "matrix": {
                "strategy": list(strategies),
                "world_size": sorted(set(strategies.values())),
            },
            "limits": {"trial_seconds": STRATEGY_SECONDS},
            "device": "cuda",
        }
    )
    with scratch_folder() as folder:
        try:
            made = verify_experiment(experiment, folder / "verification", progress=listener)
        except ShardmarkError as error:
            yield _failed("strategies", str(error), "report it with all of this")
            return
    order = list(strategies)
    for verdict in sorted(made.verdicts, key=lambda verdict: order.index(verdict.strategy)):
        if verdict.tried_as is None:
            yield _strategy(verdict)


def _strategy(verdict: Verdict) -> Check:
    ranks = "1 rank" if verdict.world_size == 1 else f"{verdict.world_size} ranks"
    words = f"{ranks}, {verdict.precision}: {verdict_text(verdict)}"
    if verdict.cause is None:
        return _fine(verdict.strategy, words)
    cause = f"{words}: {verdict.cause.text} ({verdict.cause.evidence})"
    if accepted(verdict):
        remedy = "nothing to mend: it is not to be had here"
        return Check(name=verdict.strategy, state=State.NOTE, found=cause, remedy=remedy)
    return _failed(verdict.strategy, cause, verdict.cause.setting or "report it with all of this")


def _fine(name: str, found: str) -> Check:
    return Check(name=name, state=State.OK, found=found)


def _failed(name: str, found: str, remedy: str) -> Check:
    return Check(name=name, state=State.FAILED, found=found, remedy=remedy)
