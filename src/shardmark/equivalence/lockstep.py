"""Ranks played by one process that wait for each other, as those with synchronised norms do."""

from __future__ import annotations

import random
from collections.abc import Callable
from threading import Semaphore, Thread
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from shardmark.core.errors import InputError

Played = TypeVar("Played")


class OutOfStepError(Exception):
    """Ranks that are played do not come to the same exchange."""


class Lockstep:
    """Plays ranks in threads, of which one runs at a time, until it waits for the others.

    So each draws its own random numbers, in its own order.
    """

    def __init__(self, ranks: int, device: torch.device) -> None:
        self._device = device
        self._batons = [Semaphore(0) for _ in range(ranks)]
        self._playing: list[int] = []
        """Ranks that have not come to their end."""
        self.current = 0
        """The rank that runs."""
        self._given: list[tuple[object, Any]] = []
        """Kinds and values of the round under way, in order of rank: so they take turns."""
        self._values: list[Any] = []
        """Values of the last round that all ranks came to."""
        self._rounds = 0

    def play(self, rank_of: Callable[[int], Played]) -> list[Played]:
        """What it returns for each rank.  Raises what the first one raises."""
        results: dict[int, Played] = {}
        errors: list[BaseException] = []

        def run(rank: int) -> None:
            self._take_turn(rank)
            try:
                results[rank] = rank_of(rank)
            except BaseException as error:
                errors.append(error)
            self._playing.remove(rank)
            self._hand_on(rank)

        self._playing, self._given = list(range(len(self._batons))), []
        threads = [Thread(target=run, args=(rank,), daemon=True) for rank in self._playing]
        for thread in threads:
            thread.start()
        self._batons[0].release()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return [results[rank] for rank in sorted(results)]

    def gather(self, rank: int, rows: Tensor) -> tuple[Tensor, int]:
        """All ranks' rows one after the other, and at which of them this rank's begin.

        Raises `InputError` where another rank is at something else, or comes to its end.
        """
        try:
            values = self.exchange(rank, rows.shape[1:], rows)
        except OutOfStepError as error:
            found = "ranks pass its batch norms different numbers of times"
            remedy = "set recipe.sync_batch_norm to false"
            raise InputError("workload.model", found, remedy) from error
        return torch.cat(values), sum(map(len, values[:rank]))

    def exchange(self, rank: int, kind: object, value: Any) -> list[Any]:
        """Return the values of all ranks, in their order, once each has given one of that kind.

        Raises `OutOfStepError` where another rank is at something else, or comes to its end.
        """
        wanted = self._rounds + 1
        if any(other != kind for other, _ in self._given):
            raise OutOfStepError
        self._given.append((kind, value))
        if len(self._given) == len(self._batons):
            self._values, self._given = [value for _, value in self._given], []
            self._rounds += 1
        states = generator_states(self._device)
        self._hand_on(rank)
        self._take_turn(rank)
        _restore(states, self._device)
        if self._rounds < wanted:
            raise OutOfStepError
        return self._values

    @property
    def plays(self) -> bool:
        """True while ranks are played: none can wait for the others otherwise."""
        return bool(self._playing)

    def _take_turn(self, rank: int) -> None:
        self._batons[rank].acquire()
        self.current = rank

    def _hand_on(self, rank: int) -> None:
        after = [other for other in self._playing if other > rank] or self._playing
        if after:
            self._batons[after[0]].release()

    def synchronise(self, model: nn.Module, rank: int) -> None:
        """While ranks are played, the rank's batch norms take in what all of them have."""
        norms: list[nn.Module] = [m for m in model.modules() if isinstance(m, _BatchNorm)]
        for norm in norms:
            norm.forward = self._over_all_ranks(norm, rank)

    def _over_all_ranks(self, norm: nn.Module, rank: int) -> Callable[[Tensor], Tensor]:
        alone: Callable[[Tensor], Tensor] = norm.forward

        def forward(inputs: Tensor) -> Tensor:
            if not norm.training or not self._playing:
                return alone(inputs)
            last = inputs.movedim(1, -1)  # (samples, ..., channels)
            rows = last.flatten(0, -2)
            joined, start = self.gather(rank, rows)
            # The norm looks at the number of dimensions: maps of one pixel each.
            normed = alone(joined.reshape(*joined.shape, *[1] * (inputs.dim() - 2)))
            own = normed.reshape(joined.shape)[start : start + len(rows)].reshape(last.shape)
            # A copy, for a part of what all ranks have would keep all of it; laid out as the inputs
            # are, for dropout draws in the order of the memory.
            return torch.empty_like(inputs).copy_(own.movedim(-1, 1))

        return forward


GeneratorStates = tuple[list[Tensor], Any, Any]


def generator_states(device: torch.device) -> GeneratorStates:
    """Return the states of the generators that a model on the device draws from.

    Those of torch, one for the CPU and one for the GPU, and those of Python and numpy.
    """
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return states, random.getstate(), np.random.get_state(legacy=True)


def same_states(states: GeneratorStates, others: GeneratorStates) -> bool:
    """Return whether nothing was drawn between the two."""
    arrays = zip(states[2], others[2], strict=True)
    return (
        all(map(torch.equal, states[0], others[0]))
        and states[1] == others[1]
        and all(np.array_equal(mine, other) for mine, other in arrays)
    )


def _restore(states: GeneratorStates, device: torch.device) -> None:
    torch.set_rng_state(states[0][0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states[0][1], device)
    random.setstate(states[1])
    np.random.set_state(states[2])
