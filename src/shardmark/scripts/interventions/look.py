"""Changes nothing: looks every few milliseconds what the rank's main thread does, and where."""

from __future__ import annotations

import linecache
import os
import re
import sys
import threading
import time
from collections import Counter
from types import CodeType, FrameType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree  # torch has no public one
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from shardmark.base.traffic import required_fraction
from shardmark.scripts.batches import leaves
from shardmark.scripts.interventions import CALLS, built
from shardmark.scripts.interventions.arguments import Arguments
from shardmark.scripts.interventions.base import NAMES, Intervention, is_users, line_of, replace

EVERY_SECONDS = 0.002
SWITCH_SECONDS = 0.0005
"""Time after which Python's own code gives way to a look; else a look comes when it has ended."""
LINK_BYTES = 2**22
"""Size of the message that measures the link: its start takes a small part of the time."""
LINK_CALLS = 4
FP32_BYTES = 4
"""Least bytes of an element of a gradient: it may be reduced in more than its parameter has."""
MOST_WORKERS = "1024"
"""Value of the savings that add arguments, when they note the calls that they fit."""
PROFILED_STEP = 1
"""Step of the warm-up whose functions are searched for one that makes batches."""
MAKES_BATCHES = re.compile(r"batch|data|sample|load|fetch|input|next", re.IGNORECASE)
KINDS: list[list[str]] = NAMES["kinds_of_frames"]
"""File and function of a frame, from the outermost one inwards, and what the thread does there."""


class Look(Intervention):
    """Counts what the main thread does while steps are measured, by kind and line of the script."""

    def install(self) -> None:
        self.main = threading.main_thread().ident
        self.nanoseconds: Counter[tuple[str, str | None]] = Counter()
        """Time by kind and line: of each look, the time since the one before."""
        self.count = 0
        self.ended = threading.Event()
        self.functions: Counter[str] = Counter()
        self.loader: DataLoader[Any] | None = None
        self.places: dict[int, str | None] = {}
        self.rows: list[int] = []
        self.trained: dict[int, int] = {}
        """Bytes of the gradients of parameters that optimizers were made for, by `id`."""
        self.wrappers: set[str] = set()
        self.passes, self.passes_of_step, self.optimizers = 0, 1, 0
        self.thread: threading.Thread | None = None
        self.kinds: dict[CodeType, str | None] = {}
        self.link_bytes_per_second: float | None = None
        self.latest: tuple[DataLoader[Any] | None, int] | None = None
        """Loader and size of the latest batch, until a backward pass shows that it trains."""
        self._watch_loaders()

        def optimized(original: Any, optimizer: Any, *arguments: Any, **keywords: Any) -> None:
            original(optimizer, *arguments, **keywords)
            self.optimizers += 1
            groups = optimizer.param_groups  # DeepSpeed replaces them by its shards
            self.trained |= {
                # FSDP1's flat tensors are shards that know the whole size
                id(p): getattr(p, "_unpadded_unsharded_size", p.shape).numel()
                * max(FP32_BYTES, p.element_size())
                for group in groups
                for p in group["params"]
                if p.requires_grad
            }

        def wrapped(original: Any, *arguments: Any, **keywords: Any) -> Any:
            self.wrappers.add(original.__qualname__.removesuffix(".__init__").rpartition(".")[2])
            return original(*arguments, **keywords)

        def backward(original: Any, *arguments: Any, **keywords: Any) -> None:
            self.passes += torch._C._current_graph_task_id() < 0  # none inside of another
            if self.latest is not None:
                self.loader, size = self.latest
                self.rows += [size] if size else []
                self.latest = None
            original(*arguments, **keywords)

        self.savings = dict(zip(CALLS, built(dict.fromkeys(CALLS, MOST_WORKERS)), strict=True))
        for saving in self.savings.values():
            assert isinstance(saving, Arguments), "its name says so"
            saving.changes = False
            saving.install()
        replace(torch.autograd, "backward", backward)
        replace(DistributedDataParallel, "__init__", wrapped)
        replace(DistributedDataParallel, "no_sync", wrapped)
        replace(fsdp, "fully_shard", wrapped)
        replace(torch, "compile", wrapped)
        replace(nn.Conv2d, "__init__", wrapped)
        replace(Optimizer, "__init__", optimized)

    def _watch_loaders(self) -> None:
        def made(original: Any, loader: Any, *arguments: Any, **keywords: Any) -> None:
            original(loader, *arguments, **keywords)
            self.places[id(loader)] = line_of(sys._getframe(2))

        loaders: dict[int, DataLoader[Any]] = {}

        def started(original: Any, iterator: Any, loader: Any) -> None:
            original(iterator, loader)
            loaders[id(iterator)] = loader

        def batch(original: Any, iterator: Any) -> Any:
            loaded = original(iterator)
            size = max((tensor.numel() for tensor in leaves(loaded)), default=0)
            self.latest = (loaders.get(id(iterator)), size)
            return loaded

        replace(DataLoader, "__init__", made)
        replace(_BaseDataLoaderIter, "__init__", started)
        replace(_BaseDataLoaderIter, "__next__", batch)

    def stepped(self, step: int) -> None:
        self.passes, self.passes_of_step = 0, self.passes
        if step == PROFILED_STEP:
            sys.setprofile(self._returned)
        elif step == PROFILED_STEP + 1:
            sys.setprofile(None)

    def _returned(self, frame: FrameType, event: str, value: Any) -> None:
        """Note functions of the user that return or yield tensors that nothing was computed of."""
        code = frame.f_code
        if event != "return" or not MAKES_BATCHES.search(code.co_name) or not is_users(frame):
            return
        tensors = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
        if tensors and all(tensor.grad_fn is None and tensor.dim() for tensor in tensors):
            self.functions[code.co_name] += 1

    def begin(self) -> None:
        self.rows.clear()
        if dist.is_initialized():
            self.link_bytes_per_second = _link_bytes_per_second()
        sys.setswitchinterval(SWITCH_SECONDS)
        self.thread = threading.Thread(target=self._look, daemon=True)
        self.thread.start()

    def _look(self) -> None:
        before = time.perf_counter_ns()
        while not self.ended.wait(EVERY_SECONDS):
            stack = self._stack(sys._current_frames().get(self.main or 0))
            now = time.perf_counter_ns()  # Python's own code delays looks at it
            if stack is not None:
                self.nanoseconds[self._kind_of(stack), line_of(stack)] += now - before
                self.count += 1
            before = now

    def _stack(self, frame: FrameType | None) -> Any:
        """Copy what is read of frames: one that is kept beyond its end keeps its tensors.

        Torch then cannot print them, and the main thread runs as soon as a path is looked up.
        """
        frames, copy = [], None
        while frame is not None:
            is_call = self._kind_of_code(frame.f_code) == "forward"
            values = {"self": frame.f_locals.get("self")} if is_call else {}
            frames.append({"f_code": frame.f_code, "f_lineno": frame.f_lineno, "f_locals": values})
            frame = frame.f_back
        for seen in reversed(frames):
            copy = SimpleNamespace(**seen, f_back=copy)
        return copy

    def _kind_of(self, frame: FrameType | None) -> str:
        frames = []
        innermost = frame
        while frame is not None:
            frames.append(frame)
            frame = frame.f_back
        # Lightning calls a user's step as the forward pass of a module.
        steps = (f.f_code.co_name == "training_step" and is_users(f) for f in frames)
        inside = next((n for n, is_step in enumerate(steps) if is_step), None)
        updates = False
        for outer in reversed(frames[:inside]):
            kind = self._kind_of_code(outer.f_code)
            if updates and is_users(outer):
                if outer.f_code.co_name == "step":  # the user has written the optimizer
                    return "update"
                updates = False  # a closure computes a step, as all of Lightning's do
            if kind == "update" or (updates and kind not in {"forward", "backward", "input"}):
                updates = True
                continue
            if kind == "forward" and isinstance(module := outer.f_locals.get("self"), nn.Module):
                return "forward" if module.training else "evaluation"
            if kind is not None:
                return kind
            if outer.f_code.co_name in self.functions and is_users(outer):
                return "input"
        if updates:
            return "update"
        assert innermost is not None, "the main thread runs"
        source = linecache.getline(innermost.f_code.co_filename, innermost.f_lineno)
        return "logging" if re.search(r"\bprint\(|std(out|err)\.write\(", source) else "own_code"

    def _kind_of_code(self, code: CodeType) -> str | None:
        if code not in self.kinds:
            file, function = code.co_filename, code.co_name
            matches = (k for f, n, k in KINDS if re.search(f, file) and re.fullmatch(n, function))
            self.kinds[code] = next(matches, None)
        return self.kinds[code]

    def facts(self) -> dict[str, object]:
        self.ended.set()
        if self.thread is not None:
            self.thread.join(timeout=1.0)
        total = sum(self.nanoseconds.values())
        shares: Counter[str] = Counter()
        lines: dict[str, Counter[str]] = {}
        for (kind, line), spent in self.nanoseconds.items():
            shares[kind] += spent
            if line is not None:
                lines.setdefault(kind, Counter())[line] += spent
        facts: dict[str, object] = {
            "looks": self.count,
            "shares": {kind: spent / total for kind, spent in shares.items()},
            "lines": {
                kind: [[line, spent / total] for line, spent in by_line.most_common(3)]
                for kind, by_line in lines.items()
            },
            "functions": [*self.functions],
            "rows": [*self.rows],  # untimed steps follow
            "wrappers": sorted(self.wrappers),
            "fits": [name for name, saving in self.savings.items() if saving.facts()],
            "on_gpu": torch.cuda.is_initialized(),  # type: ignore[no-untyped-call]
            "passes": self.passes_of_step - max(0, self.optimizers - 1),  # those of one of them
            "threads": torch.get_num_threads(),
            "cores": len(os.sched_getaffinity(0)),
            "trained_tensors": len(self.trained),
            "trained_bytes": sum(self.trained.values()),
            "link_bytes_per_second": self.link_bytes_per_second,
        }
        if self.loader is not None:
            facts["loader"] = {
                "place": self.places.get(id(self.loader)),
                "workers": self.loader.num_workers,
                "batch": self.loader.batch_size,
            }
        return facts


def _link_bytes_per_second() -> float:
    """Return the bytes a second that a rank sends in an all-reduce beside which nothing happens."""
    device = f"cuda:{torch.cuda.current_device()}" if "nccl" in dist.get_backend() else "cpu"
    message = torch.zeros(LINK_BYTES, dtype=torch.uint8, device=device)
    seconds = []
    for _ in range(LINK_CALLS):
        started = time.perf_counter()
        dist.all_reduce(message)
        message[0].item()  # waits for the device
        seconds.append(time.perf_counter() - started)
    return (
        (required_fraction("all_reduce", dist.get_world_size()) or 0.0) * LINK_BYTES / min(seconds)
    )
