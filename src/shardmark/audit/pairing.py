"""Pairs of parameters of two models, by name, by what wrappers add to names, by shape and order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

Shapes = Mapping[str, tuple[int, ...]]


def paired_names(shapes: Shapes, other: Shapes) -> dict[str, str]:
    """Return the other model's name of each parameter that has one of its shape there.

    Names are equal, or equal behind a prefix that all names of a model have, or the models have
    the same shapes in the same order.
    """
    for prefix in _prefixes(shapes):
        for other_prefix in _prefixes(other):
            names = {name.removeprefix(other_prefix): name for name in other}
            pairs = {
                name: names[name.removeprefix(prefix)]
                for name in shapes
                if name.removeprefix(prefix) in names
            }
            if 2 * len(pairs) > min(len(shapes), len(other)):
                return {a: b for a, b in pairs.items() if shapes[a] == other[b]}
    if [*shapes.values()] == [*other.values()]:
        return dict(zip(shapes, other, strict=True))
    counts = [Counter(of_model.values()) for of_model in (shapes, other)]
    by_shape = {shape: name for name, shape in other.items()}
    return {
        name: by_shape[shape]
        for name, shape in shapes.items()
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
