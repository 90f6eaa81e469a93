"""Runs simulated ranks in threads of one process, which wait for each other at exchanges."""

from __future__ import annotations

import random
from collections.abc import Callable
from threading import Semaphore, Thread
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from shardmark.base.errors import InputError

Result = TypeVar("Result")


class OutOfStepError(Exception):
    """Raised when simulated ranks do not reach the same exchange."""


class Lockstep:
    """Runs ranks in threads, one at a time, each until it waits for the others.

    Each rank thus draws its own random numbers, in its own order.
    """

    def __init__(self, ranks: int, device: torch.device) -> None:
        self._device = device
        self._turns = [Semaphore(0) for _ in range(ranks)]
        self._running: list[int] = []
        """Ranks that have not finished."""
        self.current = 0
        """The rank whose thread is running."""
        self._offered: list[tuple[object, Any]] = []
        """Kinds and values of the current round, in order of rank, which is that of the turns."""
        self._values: list[Any] = []
        """Values of the last round that all ranks completed."""
        self._rounds = 0

    def run(self, function: Callable[[int], Result]) -> list[Result]:
        """Call the function for each rank and return its results; re-raises the first error."""
        results: dict[int, Result] = {}
        errors: list[BaseException] = []

        def run_rank(rank: int) -> None:
            self._take_turn(rank)
            try:
                results[rank] = function(rank)
            except BaseException as error:
                errors.append(error)
            self._running.remove(rank)
            self._hand_on(rank)

        self._running, self._offered = list(range(len(self._turns))), []
        threads = [Thread(target=run_rank, args=(rank,), daemon=True) for rank in self._running]
        for thread in threads:
            thread.start()
        self._turns[0].release()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return [results[rank] for rank in sorted(results)]

    def gather(self, rank: int, rows: Tensor) -> tuple[Tensor, int]:
        """Concatenate the rows of all ranks; returns them and the index of this rank's first row.

        Raises `InputError` if another rank is at another exchange or has finished.
        """
        try:
            values = self.exchange(rank, rows.shape[1:], rows)
        except OutOfStepError as error:
            problem = "ranks call its batch norms different numbers of times"
            remedy = "set recipe.sync_batch_norm to false"
            raise InputError("workload.model", problem, remedy) from error
        return torch.cat(values), sum(map(len, values[:rank]))

    def exchange(self, rank: int, kind: object, value: Any) -> list[Any]:
        """Return the values of all ranks, in order, once each has offered one of that kind.

        Raises `OutOfStepError` if another rank is at another exchange or has finished.
        """
        expected_round = self._rounds + 1
        if any(other != kind for other, _ in self._offered):
            raise OutOfStepError
        self._offered.append((kind, value))
        if len(self._offered) == len(self._turns):
            self._values, self._offered = [value for _, value in self._offered], []
            self._rounds += 1
        states = generator_states(self._device)
        self._hand_on(rank)
        self._take_turn(rank)
        torch.set_rng_state(states[0][0])
        if self._device.type == "cuda":
            torch.cuda.set_rng_state(states[0][1], self._device)
        random.setstate(states[1])
        np.random.set_state(states[2])
        if self._rounds < expected_round:
            raise OutOfStepError
        return self._values

    @property
    def is_running(self) -> bool:
        """True while ranks run; only then can they wait for each other."""
        return bool(self._running)

    def _take_turn(self, rank: int) -> None:
        self._turns[rank].acquire()
        self.current = rank

    def _hand_on(self, rank: int) -> None:
        following = [other for other in self._running if other > rank] or self._running
        if following:
            self._turns[following[0]].release()

    def synchronise(self, model: nn.Module, rank: int) -> None:
        """Make the rank's batch norms use the inputs of all ranks while ranks run."""
        norms: list[nn.Module] = [m for m in model.modules() if isinstance(m, _BatchNorm)]
        for norm in norms:
            norm.forward = self._over_all_ranks(norm, rank)

    def _over_all_ranks(self, norm: nn.Module, rank: int) -> Callable[[Tensor], Tensor]:
        original: Callable[[Tensor], Tensor] = norm.forward

        def forward(inputs: Tensor) -> Tensor:
            if not norm.training or not self._running:
                return original(inputs)
            last = inputs.movedim(1, -1)  # (samples, ..., channels)
            rows = last.flatten(0, -2)
            joined, start = self.gather(rank, rows)
            # The norm checks the number of dimensions: pass maps of one pixel.
            normed = original(joined.reshape(*joined.shape, *[1] * (inputs.dim() - 2)))
            own_rows = normed.reshape(joined.shape)[start : start + len(rows)].reshape(last.shape)
            # Copy, since a slice would keep the rows of all ranks in memory; keep the memory format
            # that the inputs have, since dropout draws in memory order.
            return torch.empty_like(inputs).copy_(own_rows.movedim(-1, 1))

        return forward


GeneratorStates = tuple[list[Tensor], Any, Any]


def generator_states(device: torch.device) -> GeneratorStates:
    """States of the random generators of torch (CPU, and GPU if used), Python and numpy."""
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return states, random.getstate(), np.random.get_state(legacy=True)


def same_states(states: GeneratorStates, others: GeneratorStates) -> bool:
    """True if nothing was drawn between the two."""
    arrays = zip(states[2], others[2], strict=True)
    return (
        all(map(torch.equal, states[0], others[0]))
        and states[1] == others[1]
        and all(np.array_equal(first, second) for first, second in arrays)
    )
