"""The options of a plan, and the experiment that they mean."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal

from shardmark.base.errors import InputError
from shardmark.base.results.store import StoredRun
from shardmark.experiment.experiment import Experiment
from shardmark.experiment.load import Override, load_experiment
from shardmark.predict.hardware.catalogue import Card, load_node, nodes_of
from shardmark.predict.model_name import adapter_of, experiment_of, is_experiment
from shardmark.predict.timing import CONSTANTS, Constants, Stack
from shardmark.ranks.workloads.language.options import LanguageOptions

PRECISIONS = ("bf16", "fp16", "fp32")
FP8 = "fp8"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """The options of a plan, of the command line and of Python."""

    subject: str | Experiment
    """A model, the file of an experiment, the name of a preset, or an experiment."""
    machines: tuple[str, ...]
    """Kinds of machines.  A name has the number of nodes itself, as in `2x8xh100`, or `nodes`."""
    nodes: tuple[int, ...] = (1,)
    batch: int | None = None
    """Samples of a device in a step."""
    sequence_length: int | None = None
    precision: str | None = None
    """`fp8`: products inside blocks are in 8 bits, and everything else in bf16."""
    adapter: str | None = None
    reference_model: bool = False
    """Count a frozen copy of the model in memory, as DPO needs one."""
    overrides: tuple[str | Override, ...] = ()
    stack: Stack | None = None
    """Vintage of the software; None for `fused` of language models, and `eager` of others."""
    run: StoredRun | None = None
    """A stored run of the model, or of a script, that the predictions start from."""
    measured: str | None = None
    """A measured speed that the predictions start from, as `3,100 tokens/s on 1xa100-80`."""
    measured_batch: int | None = None
    """Samples of a device in a measured step; None for `batch`."""
    measured_model: str | None = None
    """The model that was measured; None for the planned one."""
    prices_per_hour: tuple[float, ...] = ()
    """Dollars for a card's hour: one price for all kinds of machines, or one for each."""
    search: bool = False
    """Compare all layouts of the most ranks, for the first values of the other axes."""
    work: float | None = None
    """Tokens or samples to price."""
    work_unit: Literal["tokens", "samples"] | None = None
    """Unit of the work; None for tokens of a language model, else samples."""
    padding: float | None = None
    """Fraction of a sample's tokens that are padding."""
    mean_length: float | None = None
    """The same by the mean number of the other tokens."""
    assumed: str | None = None
    """Assumptions about a model that was named alone; None for an experiment of the user."""

    def __post_init__(self) -> None:
        padding, length = self.padding, self.mean_length
        if padding is not None and length is not None:
            raise InputError("--padding", "--mean-length is given as well", "give one of them")
        if padding is not None and not 0 <= padding < 1:
            raise InputError(
                "--padding", f"found {padding:g}", "allowed are fractions from 0 to 0.99"
            )
        if length is not None and not length > 0:
            raise InputError("--mean-length", f"found {length:g}", "allowed are numbers above 0")

    def useful_tokens(self, tokens: float) -> float:
        """Return how many of a sample's tokens are no padding.

        Raises `InputError` for a mean length of more tokens than a sample has.
        """
        length = (
            (1 - (self.padding or 0.0)) * tokens if self.mean_length is None else self.mean_length
        )
        if length > tokens:
            problem = f"found {length:g}, but samples have {tokens:g} tokens"
            raise InputError("--mean-length", problem, "give at most that, or a --sequence-length")
        return length

    @property
    def experiment(self) -> Experiment:
        """The experiment of a resolved request."""
        assert isinstance(self.subject, Experiment), "a resolved request"
        return self.subject

    @property
    def constants(self) -> Constants:
        """Constants of a resolved request's stack."""
        assert self.stack is not None, "a resolved request"
        return CONSTANTS[self.stack]

    @property
    def fp8(self) -> bool:
        return self.precision == FP8

    def resolved(self) -> PlanRequest:
        """Return the request with the experiment that its subject names.

        The machines choose the strategies of a model and, unless it is given, its precision.
        Raises `InputError` for an unknown name.
        """
        if isinstance(self.subject, Experiment):
            language = isinstance(self.subject.workload, LanguageOptions)
            fused = language and self.subject.recipe.precision != "fp32"  # as FlashAttention asks
            return replace(self, stack=self.stack or ("fused" if fused else "eager"))
        precision = "bf16" if self.fp8 else self.precision
        if is_experiment(self.subject):
            chosen = {
                "recipe.per_rank_batch": self.batch,
                "workload.sequence_length": self.sequence_length,
                "recipe.precision": precision,
            }
            options = [f"{key}={value}" for key, value in chosen.items() if value is not None]
            experiment = load_experiment(self.subject, [*options, *self.overrides])
            if self.adapter is not None:
                adapter = adapter_of(self.adapter, experiment.recipe.precision)
                options.append(f"workload.adapter={adapter.model_dump_json()}")
                experiment = load_experiment(self.subject, [*options, *self.overrides])
            return replace(self, subject=experiment).resolved()
        named = map(nodes_of, self.machines)
        loaded = [(load_node(node), count or self.nodes[-1]) for node, count in named]
        precision = precision or _precision([node.card for node, _ in loaded])
        experiment, assumed = experiment_of(self, loaded, precision)
        return replace(self, subject=experiment, assumed=assumed).resolved()


def _precision(cards: Sequence[Card]) -> str:
    """Return the first precision that all cards have in hardware."""
    for precision in PRECISIONS:
        with suppress(InputError):
            _ = [card.peak(precision) for card in cards]
            return precision
    return PRECISIONS[-1]
