"""Takes loading away: the batches of the warm-up are returned again, on all ranks or exchanged."""

from __future__ import annotations

import ast
import copy
import functools
import inspect
import itertools
import math
import re
import runpy
from collections.abc import Callable, Iterator, MutableMapping
from itertools import cycle
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from shardmark.scripts.interventions.base import Intervention, replace

NUMBER = re.compile(r"\b\d+\b")
MOST_KEPT = 32
"""Batches that are kept of a loader or function: an evaluation may have many."""


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
        self.ends: dict[object, float] = {}
        """Numbers of batches that loaders without a length, and generators, gave to their end."""
        self.first_of: dict[object, object] = {}
        """First call of a generator by its arguments without numbers, as those of epochs."""
        self.begun = False
        self.returned = 0
        counts: dict[int, int] = {}
        """Number of batches that each iterator of a loader has given."""

        def batch(original: Callable[..., Any], iterator: Any) -> Any:
            loader = id(iterator._dataset)
            count = counts[id(iterator)] = counts.get(id(iterator), 0) + 1
            length = self.length(iterator)
            if self.begun and loader in self.again:
                if count > length:
                    raise StopIteration
                return self.once_more(loader)
            try:
                loaded = original(iterator)
            except StopIteration:
                self.ends[loader] = count - 1
                raise
            if not self.begun or length < math.inf:
                self.keep(loader, loaded)
            return _copied(loaded)

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

    def length(self, iterator: Any) -> float:
        try:
            return len(iterator)
        except (TypeError, NotImplementedError):
            return self.ends.get(id(iterator._dataset), math.inf)

    def keep(self, source: object, batch: Any) -> None:
        if self.begun:  # a loader that is used for the first time
            self.again[source] = cycle([batch])
        elif len(batches := self.kept_batches.setdefault(source, [])) < MOST_KEPT:
            batches.append(batch)

    def once_more(self, source: object) -> Any:
        self.returned += 1
        return _copied(next(self.again[source]))

    def of_function(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function or generator in the place of one that makes batches."""

        @functools.wraps(function)
        def call(*arguments: Any, **keywords: Any) -> Any:
            if self.begun and function in self.again:
                return self.once_more(function)
            self.keep(function, batch := function(*arguments, **keywords))
            return _copied(batch)

        @functools.wraps(function)
        def generate(*arguments: Any, **keywords: Any) -> Iterator[Any]:
            batches = function(*arguments, **keywords)
            words = repr((arguments, keywords))  # an evaluation's has an end of its own
            source: object = function, words
            first = self.first_of.setdefault((function, NUMBER.sub("", words)), source)
            if self.begun and source not in self.again:  # it is for another epoch
                source = first
            for count in itertools.count():
                if self.begun and source in self.again:
                    if count >= self.ends.get(source, math.inf):
                        return
                    yield self.once_more(source)
                elif (batch := next(batches, self)) is not self:
                    if not self.begun:
                        self.keep(source, batch)
                    yield _copied(batch)
                else:
                    self.ends[source] = count
                    return

        return generate if inspect.isgeneratorfunction(function) else call

    def begin(self) -> None:
        self.again = {source: cycle(batches) for source, batches in self.kept_batches.items()}
        self.begun = True

    def facts(self) -> dict[str, object]:
        return {"returned": self.returned}


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
