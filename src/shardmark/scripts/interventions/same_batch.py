"""Takes loading away: the batches of the warm-up are returned again, on all ranks or exchanged."""

from __future__ import annotations

import ast
import copy
import functools
import inspect
import math
import runpy
from collections.abc import Callable, Iterator, MutableMapping
from itertools import cycle
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from shardmark.scripts.interventions.base import Intervention, replace


class _Again(_BaseDataLoaderIter):
    """Iterates over batches that are there: it starts no workers, and no reading."""

    def _shutdown_workers(self) -> None:
        """Do nothing: some scripts call it."""


class SameBatch(Intervention):
    """Returns the batches of the warm-up again, from loaders and from functions of the script.

    The value names functions or generators of the script that make batches, with `+` between.
    """

    def install(self) -> None:
        self.again: dict[object, Iterator[Any]] = {}
        """Batches by loader or function, once the warm-up is over."""
        self.kept_batches: dict[object, list[Any]] = {}
        self.begun = False
        counts: dict[int, int] = {}
        """Number of batches that each iterator of a loader has given."""

        def batch(original: Callable[..., Any], iterator: Any) -> Any:
            loader = id(iterator._dataset)
            count = counts[id(iterator)] = counts.get(id(iterator), 0) + 1
            if self.begun and loader in self.again:
                if count > _length(iterator):
                    raise StopIteration
                return _copied(next(self.again[loader]))
            return self.keep(loader, original(iterator))

        def start(original: Callable[..., Any], iterator: Any, loader: Any, *rest: Any) -> None:
            counts.pop(id(iterator), None)
            original(iterator, loader, *rest)

        def iterate(original: Callable[..., Any], loader: Any) -> Any:
            if not self.begun or id(loader.dataset) not in self.again:
                return original(loader)
            return _Again(loader)

        replace(DataLoader, "__iter__", iterate)
        replace(_BaseDataLoaderIter, "__next__", batch)
        replace(_BaseDataLoaderIter, "__init__", start)
        replace(_BaseDataLoaderIter, "_reset", start)
        if self.value:
            _decorate_functions(self.value.split("+"), self.of_function)

    def keep(self, source: object, batch: Any) -> Any:
        if self.begun:  # a loader that is used for the first time
            self.again[source] = cycle([batch])
        else:
            self.kept_batches.setdefault(source, []).append(batch)
        return _copied(batch)

    def of_function(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function or generator in the place of one that makes batches."""

        @functools.wraps(function)
        def call(*arguments: Any, **keywords: Any) -> Any:
            if self.begun and function in self.again:
                return _copied(next(self.again[function]))
            return self.keep(function, function(*arguments, **keywords))

        @functools.wraps(function)
        def generate(*arguments: Any, **keywords: Any) -> Iterator[Any]:
            batches = function(*arguments, **keywords)
            while True:
                if self.begun and function in self.again:
                    yield _copied(next(self.again[function]))
                elif (batch := next(batches, self)) is not self:
                    yield self.keep(function, batch)
                else:
                    return

        return generate if inspect.isgeneratorfunction(function) else call

    def begin(self) -> None:
        self.again = {source: cycle(batches) for source, batches in self.kept_batches.items()}
        self.begun = True


class RowsOf(SameBatch):
    """The same with the batches of another rank: the value is `next`, or the number of a rank."""

    def __init__(self, place: Any, value: str = "") -> None:
        rank, _, functions = value.partition("+")
        super().__init__(place, functions)
        self.rank = (place.rank + 1) % place.world_size if rank == "next" else int(rank)

    def begin(self) -> None:
        batches = self.place.exchange("rows", [*self.kept_batches.values()], self.rank)
        self.again = dict(zip(self.kept_batches, map(cycle, batches), strict=True))
        self.begun = True


def _length(iterator: Any) -> float:
    try:
        return len(iterator)
    except TypeError:
        return math.inf


def _copied(batch: Any) -> Any:
    """Copy containers: scripts take entries out of a batch."""
    return copy.copy(batch) if isinstance(batch, MutableMapping | list) else batch


def _decorate_functions(names: list[str], decorate: Callable[..., Any]) -> None:
    """Replace functions of `__main__`, called by these names, as soon as they are defined."""

    class Decorate(ast.NodeTransformer):
        def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
            if node.name in names:
                node.decorator_list.append(ast.Name("__kept__", ast.Load()))
            return ast.fix_missing_locations(self.generic_visit(node))

    def run_code(original: Callable[..., Any], code: Any, scope: dict[str, Any], *rest: Any) -> Any:
        source = Path(code.co_filename).read_bytes()
        tree = Decorate().visit(ast.parse(source, code.co_filename))
        scope["__kept__"] = decorate
        return original(compile(tree, code.co_filename, "exec"), scope, *rest)

    replace(runpy, "_run_code", run_code)
