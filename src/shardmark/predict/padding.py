"""Padding: tokens of a sample that are computed, but that the model does not learn from."""

from __future__ import annotations

from dataclasses import dataclass

from shardmark.base.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Padding:
    """Padding of the samples of a question, as a fraction or by the mean length without it."""

    fraction: float = 0.0
    mean_length: float | None = None

    def useful_tokens(self, tokens: float) -> float:
        """Return how many of a sample's tokens are no padding.

        Raises `InputError` for a mean length of more tokens than a sample has.
        """
        if self.mean_length is None:
            return (1 - self.fraction) * tokens
        if self.mean_length > tokens:
            problem = f"found {self.mean_length:g}, but samples have {tokens:g} tokens"
            raise InputError("--mean-length", problem, "give at most that, or a --sequence-length")
        return self.mean_length


NO_PADDING = Padding()


def padding_of(fraction: float | None, mean_length: float | None) -> Padding:
    """Return the padding of a question.  Raises `InputError` for values that it cannot have."""
    if fraction is not None and mean_length is not None:
        raise InputError("--padding", "--mean-length is given as well", "give one of them")
    if fraction is not None and not 0 <= fraction < 1:
        raise InputError("--padding", f"found {fraction:g}", "allowed are fractions from 0 to 0.99")
    if mean_length is not None and not mean_length > 0:
        raise InputError("--mean-length", f"found {mean_length:g}", "allowed are numbers above 0")
    return Padding(fraction=fraction or 0.0, mean_length=mean_length)
