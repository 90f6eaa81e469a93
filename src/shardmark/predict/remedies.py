"""Finds what makes a model fit: fewer samples at once, recomputation, offload, more devices."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

from shardmark.base.errors import ShardmarkError
from shardmark.base.machine import Machine
from shardmark.base.text import counted, listed
from shardmark.experiment.matrix import unsupported_reason
from shardmark.predict.hardware.catalogue import GiB, NodeType
from shardmark.predict.memory import Fit, fit_of
from shardmark.predict.model_name import adapter_of, as_usual, strategies_of
from shardmark.predict.models import Models
from shardmark.ranks.trial import StrategySpec, Trial
from shardmark.ranks.workloads.language.options import LanguageOptions
from shardmark.ranks.workloads.models import is_user_function

MOST_TIMES, MOST_RANKS = 16, 64
"""A remedy names at most 16 times the ranks of the question; for few ranks, at most 64."""
USUAL_HOST_GIB = 2048
"""Memory of a host, if its node does not say it, as most nodes of the catalogue have."""
MOST = 3
"""Largest number of remedies."""
HELPFUL = 0.99
"""A change helps if it needs less than this fraction of the memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """A change, and the strategy that needs least memory under it."""

    change: str
    """Name of the change, as `activation checkpointing` or `16 GPUs`."""
    setting: str
    """Options of the command that make the change; empty for another machine."""
    strategy: str
    ranks: int
    device_bytes: float
    fit: Fit
    host_bytes: float = 0.0
    """Offloaded state in the memory of each node."""
    at_least: bool = False
    """True if `device_bytes` is that of a step without activations, which does not fit either."""


class _Need(NamedTuple):
    """Memory of a strategy; the smallest one fits best."""

    overflows_host: bool
    at_least: bool
    """True if no step was traced, as what is there without activations is too large."""
    device_bytes: float
    strategy: str
    fit: Fit
    host_bytes: float
    state_fits: bool
    """True if parameters, gradients and optimizer state alone may fit."""

    def remedy(self, change: str, setting: str, ranks: int) -> Remedy:
        same = {name: getattr(self, name) for name in self._fields[1:-1]}
        return Remedy(change=change, setting=setting, ranks=ranks, **same)


class Change(NamedTuple):
    """A change of an experiment that may save memory."""

    name: str
    setting: str
    applied: Callable[[Trial], Trial]


def _changed(cell: Trial, **changes: Any) -> Trial:
    return cell.changed(recipe=cell.recipe.model_copy(update=changes))


def _with_optimizer(cell: Trial, **changes: Any) -> Trial:
    """Change keys of the optimizer, where it has them."""
    optimizer = cell.recipe.optimizer
    if not changes.keys() <= {*optimizer.KEYS[optimizer.name]}:
        return cell
    return _changed(cell, optimizer=optimizer.model_copy(update=changes))


def _with_chunks(cell: Trial) -> Trial:
    """Compute the loss of a language model in pieces, where its output layer is known."""
    options = cell.workload
    if not isinstance(options, LanguageOptions) or is_user_function(options.model):
        return cell
    return cell.changed(workload=options.model_copy(update={"loss_chunks": 8}))


def _with_bf16_weights(cell: Trial) -> Trial:
    """Keep no fp32 weights, where the cards compute in bf16."""
    fits = cell.recipe.precision == "bf16" and cell.workload.casts_parameters
    return _changed(cell, weights="bf16") if fits else cell


def _with_adapter(name: str, cell: Trial) -> Trial:
    """Train an adapter, where the workload takes one; one that it has gets the base of `name`."""
    if not hasattr(cell.workload, "adapter"):
        return cell
    adapter, present = adapter_of(name, cell.recipe.precision), cell.workload.adapter
    if present is not None:
        adapter = present.model_copy(update={"base": adapter.base})
    return cell.changed(workload=cell.workload.model_copy(update={"adapter": adapter}))


CHECKPOINTING = Change(
    "activation checkpointing",
    "--set activation_checkpointing=true",
    partial(_changed, activation_checkpointing=True),
)
OFFLOAD = Change("CPU offload", "--set cpu_offload=true", partial(_changed, cpu_offload=True))
FUSED = "--set optimizer.implementation=fused"
CHANGES = (
    Change("fused optimizer", FUSED, partial(_with_optimizer, implementation="fused")),
    Change("loss in 8 pieces", "--set loss_chunks=8", _with_chunks),
    CHECKPOINTING,
    OFFLOAD,
)
"""Changes that train the same, the cheapest first; fewer samples come before the last two."""
CHANNELS_LAST = Change(
    "channels last", "--set channels_last=true", partial(_changed, channels_last=True)
)
"""A change that saves time, not memory."""
EIGHT_BITS = "--set optimizer.state_bits=8"
SMALLER_STATE = (
    Change("8-bit optimizer", EIGHT_BITS, partial(_with_optimizer, state_bits=8)),
    Change("bf16 weights", "--set recipe.weights=bf16", _with_bf16_weights),
)
"""Changes that train in lower precision."""
LORA = Change("LoRA", "--adapter lora", partial(_with_adapter, "lora"))
QLORA = Change("QLoRA", "--adapter qlora", partial(_with_adapter, "qlora"))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sizes:
    """Memory of an experiment's strategies on machines of one kind."""

    cells: Sequence[Trial]
    node: NodeType
    models: Models

    def counted(self, ranks: int) -> str:
        """Return, for example, `16 GPUs`."""
        return counted(ranks, "CPU rank" if self.node.card.device_type == "cpu" else "GPU")

    def least(
        self, ranks: int, nodes: int, changed: Callable[[Trial], Trial] = lambda cell: cell
    ) -> _Need | None:
        """Return the memory of the strategy that needs least; None if none runs."""
        needs = (self._need(changed(cell), ranks, nodes) for cell in self.cells)
        return min((need for need in needs if need is not None), default=None)

    def smallest(self, ranks: int, nodes: int) -> _Sizes:
        """Return the sizes of the two cells that need least."""
        needs = ((self._need(cell, ranks, nodes), at) for at, cell in enumerate(self.cells))
        sized = sorted((need, at) for need, at in needs if need is not None)
        cells = [self.cells[at] for _, at in sized[:2]]
        return replace(self, cells=cells or self.cells)

    def _need(self, cell: Trial, ranks: int, nodes: int) -> _Need | None:
        strategy, recipe = cell.built_strategy, cell.recipe
        card, device_type = self.node.card, self.node.card.device_type
        if unsupported_reason(strategy, ranks, nodes) is not None:
            return None
        shares = strategy.layout(ranks, nodes).shares
        if recipe.global_batch is not None and recipe.global_batch % shares:
            return None
        host_room = GiB * (self.node.node.host_memory_gib or USUAL_HOST_GIB)
        sized = partial(self.models.memory_of, cell, ranks, nodes, device_type=device_type)
        try:
            strategy.check(ranks, Machine.predicted(device_type, ranks), recipe)
            for runs in (False, True):  # nothing is traced whose state is too large
                memory = sized(runs=runs)
                host_bytes = memory.on_host * ranks / nodes
                overflows = host_bytes > host_room
                fit = "no" if overflows else fit_of(memory.peak_bytes, card)
                state_bytes = memory.parameters + memory.gradients + memory.optimizer_state
                if fit == "no":
                    break
        except ShardmarkError:
            return None
        return _Need(
            overflows_host=overflows,
            at_least=not runs,
            device_bytes=memory.device_bytes(device_type),
            strategy=str(cell.strategy),
            fit=fit,
            host_bytes=host_bytes,
            state_fits=fit_of(state_bytes, card) != "no",
        )


def fewest_devices(
    cells: Sequence[Trial], node: NodeType, nodes: int, models: Models
) -> Remedy | None:
    """Return the fewest devices of one node that are enough; None if all are needed."""
    sizes = _Sizes(cells=[*_compared(cells[0], 1), *cells], node=node, models=models)
    for ranks in range(1, node.node.devices + (nodes > 1)):
        least = sizes.least(ranks, 1)
        if least is not None and least.fit == "yes":
            return least.remedy(sizes.counted(ranks), "", ranks)
    return None


def remedies_of(
    cells: Sequence[Trial], node: NodeType, nodes: int, models: Models
) -> tuple[Remedy, ...]:
    """Return at most three changes, the cheapest first: of the recipe, of what is trained, and the
    fewest nodes on which it fits.  Changes that are not enough are left out if others are."""
    ranks = node.node.devices * nodes
    sizes = _Sizes(cells=cells, node=node, models=models).smallest(ranks, nodes)
    remedies: list[Remedy] = []

    def needs(changes: Sequence[Change]) -> _Need | None:
        return sizes.least(ranks, nodes, _combined(changes).applied)

    def add(changes: Sequence[Change]) -> bool:
        """Add the changes to the remedies; return whether they are enough."""
        if (least := needs(changes)) is None or least.overflows_host or not changes:
            return False
        change = _combined(changes)
        remedies.append(least.remedy(change.name, change.setting, ranks))
        return least.fit == "yes"

    before = needs([])
    on_device = [*CHANGES[:2], *fewer_samples(cells[0], ranks), CHECKPOINTING]
    changes = [*on_device, OFFLOAD]
    if before is not None and not before.state_fits:  # without offload nothing is enough
        changes = [OFFLOAD, CHECKPOINTING, *on_device[:-1]] if _enough([OFFLOAD], needs) else []
    helpful = _enough(changes, needs)
    if not (enough := add(helpful)):
        smaller = needs(SMALLER_STATE)
        room = smaller is not None and smaller.state_fits
        add(_enough([*on_device, *SMALLER_STATE] if room else SMALLER_STATE[1:], needs))
    recomputed = [] if cells[0].recipe.activation_checkpointing else [CHECKPOINTING]

    for adapter in (LORA, QLORA):  # up to the first that is enough
        if _enough([adapter], needs) and add(_enough([adapter, *recomputed], needs)):
            break
    larger = sizes
    if sizes.least(2 * ranks, 2 * nodes) is None:  # its strategies run on fewer devices alone
        larger = replace(sizes, cells=_compared(cells[0], 2 * ranks))
    tried = ([],) if enough or not helpful else ([], helpful)
    more = (_more_nodes(larger, nodes, _combined(changes)) for changes in tried)
    if (remedy := next(filter(None, more), None)) is not None:
        remedies.append(remedy)
    fitting = [remedy for remedy in remedies if remedy.fit == "yes"]
    return tuple(fitting or sorted(remedies, key=attrgetter("at_least", "device_bytes"))[:MOST])


def fewer_samples(cell: Trial, ranks: int) -> list[Change]:
    """Return changes to a half, a quarter, ... of the samples of a pass, and at last to one."""
    recipe = cell.recipe
    changes: list[Change] = []
    passes = recipe.gradient_accumulation
    samples = (recipe.per_rank_batch or (recipe.global_batch or 1) // ranks) // passes
    while samples > 1:
        samples //= 2
        batch, of_all = samples * passes, samples * passes * ranks
        applied = partial(_changed, global_batch=None, per_rank_batch=batch)
        setting = f"--set recipe.global_batch={of_all}" if recipe.global_batch else ""
        changes.append(Change(counted(samples, "sample"), setting or f"--batch {batch}", applied))
    return changes


def _enough(
    changes: Sequence[Change], needs: Callable[[Sequence[Change]], _Need | None]
) -> list[Change]:
    """Return changes that are enough together, none of which can be left out.

    If they are not enough, these are all that help.
    """
    chosen: list[Change] = []
    least = needs(chosen)
    for change in changes:
        less = needs([*chosen, change])
        if less is None or least is None or less.device_bytes >= HELPFUL * least.device_bytes:
            continue
        chosen, least = [*chosen, change], less
        if least.fit == "yes":
            break
    else:
        return chosen
    for change in chosen[:-1]:
        others = [other for other in chosen if other is not change]
        if (less := needs(others)) is not None and less.fit == "yes":
            chosen = others
    return chosen


def _combined(changes: Sequence[Change]) -> Change:
    """Return the changes as one; the last one of an option counts."""
    changes = [*{re.split(r"=| \d", one.setting)[0]: one for one in changes}.values()]

    def applied(cell: Trial) -> Trial:
        for change in changes:
            cell = change.applied(cell)
        return cell

    names = [change.name for change in changes]
    name = listed(names, most=len(names)) if names else ""
    return Change(name=name, setting=" ".join(one.setting for one in changes), applied=applied)


def _compared(cell: Trial, devices: int) -> list[Trial]:
    """Return the cell with each strategy that a question about a model compares on one node."""
    specs = [StrategySpec(name=name) for name in strategies_of(devices, 1)]
    return [as_usual(cell.changed(strategy=spec)) for spec in specs]


def _more_nodes(sizes: _Sizes, nodes: int, change: Change) -> Remedy | None:
    """Return the fewest nodes on which a strategy fits; None if they are too many."""
    devices, before, count = sizes.node.node.devices, nodes, 2 * nodes
    most = max(MOST_RANKS, MOST_TIMES * devices * nodes)

    def least_on(count: int) -> _Need | None:
        least = sizes.least(devices * count, count, change.applied)
        return least if least is not None and least.fit == "yes" else None

    while least_on(count) is None:
        before, count = count, 2 * count
        if devices * count > most:
            return None
    while count - before > 1:
        middle = (before + count) // 2
        before, count = (before, middle) if least_on(middle) else (middle, count)
    least = least_on(count)
    assert least is not None, "the last size that was tried fits"
    ranks = devices * count
    name = f"{sizes.counted(ranks)}{f' and {change.name}' if change.name else ''}"
    return least.remedy(name, change.setting, ranks)
