"""What a few verified steps leave behind, as arrays.  Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]

EVIDENCE = "rank-{}.evidence.npz"

PARTS = ("gradient", "parameters after step 1", "parameters", "optimizer state")
"""Kinds of tensors, in the order in which a step makes them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """A strategy's steps, or the reference's, put together from all ranks."""

    initial_sha256: tuple[str, ...]
    """By rank."""
    sample_ids: tuple[tuple[tuple[int, ...], ...], ...]
    """By rank and step."""
    losses: tuple[tuple[float, ...], ...]
    """By rank and step."""
    draws: tuple[tuple[tuple[str, ...], ...], ...]
    """By rank and step: what the model drew for each sample, as the workload tells it."""
    learning_rates: tuple[float, ...]
    optimizer_steps: int
    tensors: Mapping[str, Mapping[str, Array]]
    """By part (see `PARTS`) and name; the optimizer state's names are `parameter/key`."""
    buffers: tuple[Mapping[str, Array], ...]
    """By rank."""
    quality: Mapping[str, float | None]
    samples_evaluated: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEvidence:
    """One rank's part of the evidence.  Only rank 0's has the assembled tensors."""

    initial_sha256: str
    sample_ids: list[tuple[int, ...]]
    losses: list[float]
    learning_rates: list[float]
    optimizer_steps: int
    buffers: Mapping[str, Array]
    quality: Mapping[str, float | None]
    samples_evaluated: int
    draws: list[tuple[str, ...]] = field(default_factory=list)
    tensors: Mapping[str, Mapping[str, Array]] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        """One `.npz` file: tensors by part and name, and the rest as JSON in `facts`."""
        parts = {**self.tensors, "buffers": self.buffers}
        arrays: dict[str, Any] = {
            f"{part}\t{name}": a for part, named in parts.items() for name, a in named.items()
        }
        facts = {
            "initial_sha256": self.initial_sha256,
            "sample_ids": self.sample_ids,
            "losses": self.losses,
            "draws": self.draws,
            "learning_rates": self.learning_rates,
            "optimizer_steps": self.optimizer_steps,
            "quality": dict(self.quality),
            "samples_evaluated": self.samples_evaluated,
        }
        with path.open("wb") as file:
            np.savez(file, allow_pickle=False, facts=np.array(json.dumps(facts)), **arrays)

    @classmethod
    def load(cls, path: Path) -> RankEvidence:
        with np.load(path) as stored:
            facts: dict[str, Any] = json.loads(str(stored["facts"]))
            named: dict[str, dict[str, Array]] = {}
            for key in stored.files:
                part, tab, name = key.partition("\t")
                if tab:
                    named.setdefault(part, {})[name] = stored[key]
        return cls(
            initial_sha256=facts["initial_sha256"],
            sample_ids=[tuple(ids) for ids in facts["sample_ids"]],
            losses=facts["losses"],
            draws=[tuple(drawn) for drawn in facts["draws"]],
            learning_rates=facts["learning_rates"],
            optimizer_steps=facts["optimizer_steps"],
            buffers=named.pop("buffers", {}),
            quality=facts["quality"],
            samples_evaluated=facts["samples_evaluated"],
            tensors=named,
        )


def put_together(ranks: Sequence[RankEvidence]) -> Evidence:
    """All ranks' evidence as one."""
    first = ranks[0]
    return Evidence(
        initial_sha256=tuple(rank.initial_sha256 for rank in ranks),
        sample_ids=tuple(tuple(rank.sample_ids) for rank in ranks),
        losses=tuple(tuple(rank.losses) for rank in ranks),
        draws=tuple(tuple(rank.draws) for rank in ranks),
        learning_rates=tuple(first.learning_rates),
        optimizer_steps=min(rank.optimizer_steps for rank in ranks),
        tensors=first.tensors,
        buffers=tuple(rank.buffers for rank in ranks),
        quality=first.quality,
        samples_evaluated=first.samples_evaluated,
    )


def seen_by_one_process(evidence: Evidence) -> Evidence:
    """The same evidence as one process that drives all devices would report it (DataParallel)."""
    steps = len(evidence.learning_rates)
    return Evidence(
        initial_sha256=evidence.initial_sha256[:1],
        sample_ids=(
            tuple(
                tuple(i for rank in evidence.sample_ids for i in rank[step])
                for step in range(steps)
            ),
        ),
        draws=(
            tuple(
                tuple(sorted(d for rank in evidence.draws for d in rank[step]))
                for step in range(steps)
            ),
        ),
        losses=(tuple(float(np.mean([r[s] for r in evidence.losses])) for s in range(steps)),),
        learning_rates=evidence.learning_rates,
        optimizer_steps=evidence.optimizer_steps,
        tensors=evidence.tensors,
        buffers=evidence.buffers[:1],
        quality=evidence.quality,
        samples_evaluated=evidence.samples_evaluated,
    )
