"""Ranks played by one process that wait for each other, as those with synchronised norms do."""

from __future__ import annotations

from collections.abc import Callable
from threading import Semaphore, Thread
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from shardmark.core.errors import InputError

Played = TypeVar("Played")


class Lockstep:
    """Plays ranks in threads, of which one runs at a time, until it waits for the others.

    So each draws its own random numbers, in its own order.
    """

    def __init__(self, ranks: int, device: torch.device) -> None:
        self._device = device
        self._batons = [Semaphore(0) for _ in range(ranks)]
        self._playing: list[int] = []
        """Ranks that have not come to their end."""
        self._rows: list[Tensor] = []
        """Those of the round under way, in order of rank: so they take turns."""
        self._joined = torch.empty(0)
        self._rounds = 0

    def play(self, rank_of: Callable[[int], Played]) -> list[Played]:
        """What it returns for each rank.  Raises what the first one raises."""
        results: dict[int, Played] = {}
        errors: list[BaseException] = []

        def run(rank: int) -> None:
            self._batons[rank].acquire()
            try:
                results[rank] = rank_of(rank)
            except BaseException as error:
                errors.append(error)
            self._playing.remove(rank)
            self._hand_on(rank)

        self._playing, self._rows = list(range(len(self._batons))), []
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
        wanted = self._rounds + 1
        if any(other.shape[1:] != rows.shape[1:] for other in self._rows):
            raise _out_of_step()
        start = sum(map(len, self._rows))
        self._rows.append(rows)
        if len(self._rows) == len(self._batons):
            self._joined, self._rows = torch.cat(self._rows), []
            self._rounds += 1
        states = generator_states(self._device)
        self._hand_on(rank)
        self._batons[rank].acquire()
        _restore(states, self._device)
        if self._rounds < wanted:
            raise _out_of_step()
        return self._joined, start

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


def _out_of_step() -> InputError:
    found = "ranks pass its batch norms different numbers of times"
    return InputError("workload.model", found, "set recipe.sync_batch_norm to false")


def generator_states(device: torch.device) -> list[Tensor]:
    """States of the generators that a model on the device draws from."""
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states


def _restore(states: list[Tensor], device: torch.device) -> None:
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state(states[1], device)
