"""Pairs of parameters of two models, by name, by what wrappers add to names, by shape and order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

Shapes = Mapping[str, tuple[int, ...]]


def paired_names(shapes: Shapes, other: Shapes) -> dict[str, str]:
    """Return the other model's name of each parameter that has one of its shape there.

    Names are equal, or equal behind a prefix that most names of a model have.  The rest is paired
    in its order if it has the same shapes, as that of a module with another name, or else by unique
    shapes.
    """
    pairs: dict[str, str] = {}
    for prefix in _prefixes(shapes):
        for other_prefix in _prefixes(other):
            names = {name.removeprefix(other_prefix): name for name in other}
            by_name = ((name, names.get(name.removeprefix(prefix))) for name in shapes)
            equal = {a: b for a, b in by_name if b is not None and shapes[a] == other[b]}
            pairs = max(pairs, equal, key=len)
    if len(pairs) < len(shapes) and [*shapes.values()] == [*other.values()]:
        return dict(zip(shapes, other, strict=True))  # names may be equal by chance
    rest = {name: shape for name, shape in shapes.items() if name not in pairs}
    others = {name: shape for name, shape in other.items() if name not in {*pairs.values()}}
    if [*rest.values()] == [*others.values()]:
        return pairs | dict(zip(rest, others, strict=True))
    counts = [Counter(of_model.values()) for of_model in (rest, others)]
    by_shape = {shape: name for name, shape in others.items()}
    return pairs | {
        name: by_shape[shape]
        for name, shape in rest.items()
        if counts[0][shape] == counts[1][shape] == 1
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
