"""Pairs of parameters of two models, by value, name, what wrappers add to it, shape and order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Mapping

Shapes = Mapping[str, tuple[int, ...]]
Values = Mapping[str, float]


def paired_names(
    shapes: Shapes, other: Shapes, values: tuple[Values, Values] | None = None
) -> dict[str, str]:
    """Return the other model's name of each parameter that has one of its shape there.

    `values` are the checksums of both models' parameters: equal ones make a pair if no others of
    their shape are equal to them.  Other names are equal, or equal behind a prefix that most names
    of a model have.  The rest is paired in its order if it has the same shapes, as a module with
    another name, or else by unique shapes.
    """
    pairs: dict[str, str] = {}
    if values is not None:
        kinds, other_kinds = (
            {name: (shape, sums[name]) for name, shape in of_model.items()}
            for of_model, sums in zip((shapes, other), values, strict=True)
        )
        pairs = _unique_pairs(kinds, other_kinds)
    rest, others = _without(shapes, pairs.keys()), _without(other, pairs.values())
    by_name: dict[str, str] = {}
    for prefix in _prefixes(shapes):
        for other_prefix in _prefixes(other):
            names = {name.removeprefix(other_prefix): name for name in others}
            candidates = ((name, names.get(name.removeprefix(prefix))) for name in rest)
            equal = {a: b for a, b in candidates if b is not None and shapes[a] == other[b]}
            by_name = max(by_name, equal, key=len)
    if len(by_name) < len(rest) and [*rest.values()] == [*others.values()]:
        return pairs | dict(zip(rest, others, strict=True))  # names may be equal by chance
    rest, others = _without(rest, by_name.keys()), _without(others, by_name.values())
    in_order = [*rest.values()] == [*others.values()]
    last = dict(zip(rest, others, strict=True)) if in_order else _unique_pairs(rest, others)
    return pairs | by_name | last


def _without(shapes: Shapes, names: Collection[str]) -> Shapes:
    return {name: shape for name, shape in shapes.items() if name not in names}


def _unique_pairs(kinds: Mapping[str, Hashable], other: Mapping[str, Hashable]) -> dict[str, str]:
    """Pairs of names whose kind no other name of its model has."""
    counts = [Counter(of_model.values()) for of_model in (kinds, other)]
    names = {kind: name for name, kind in other.items()}
    return {
        name: names[kind] for name, kind in kinds.items() if counts[0][kind] == counts[1][kind] == 1
    }


def _prefixes(names: Shapes) -> list[str]:
    """Prefixes that most names have, such as `model.`, from the empty one to the longest."""
    prefixes = [""]
    while True:
        heads = Counter(
            name.removeprefix(prefixes[-1]).partition(".")[0]
            for name in names
            if name.startswith(prefixes[-1])
        )
        head, count = max(heads.items(), key=lambda pair: pair[1], default=("", 0))
        longer = f"{prefixes[-1]}{head}."
        if 2 * count <= len(names) or not any(name.startswith(longer) for name in names):
            return prefixes
        prefixes.append(longer)
