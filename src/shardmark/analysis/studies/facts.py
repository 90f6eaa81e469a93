"""What is known of models and data sets beside the studies: sizes, and published quality."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

from pydantic import PositiveInt  # noqa: TC002  # pydantic reads it at run time

from shardmark.analysis.studies.parts import Published
from shardmark.core.strict_yaml import parse_yaml

FACTS_FILE = "_facts.yaml"


class KnownModel(Published):
    """A model's size, which depends on the number of classes."""

    name: str
    classes: PositiveInt
    parameters: PositiveInt


class KnownDetector(Published):
    """The box mAP of published weights."""

    name: str
    weights: str
    map: float


class KnownDataset(Published):
    """A data set's size."""

    name: str
    classes: PositiveInt
    training_samples: PositiveInt
    source: str


class Facts(Published):
    """The whole file."""

    models: tuple[KnownModel, ...]
    detectors: tuple[KnownDetector, ...]
    datasets: tuple[KnownDataset, ...]
    counted: str
    """How the parameters were counted."""
    detectors_source: str

    def parameters(self, model: object, dataset: object) -> int | None:
        """Of the model with the data set's classes; None where it is not known."""
        known = self.dataset(dataset)
        classes = None if known is None else known.classes
        return next(
            (one.parameters for one in self.models if (one.name, one.classes) == (model, classes)),
            None,
        )

    def detector(self, model: object, weights: object) -> KnownDetector | None:
        return next(
            (one for one in self.detectors if (one.name, one.weights) == (model, weights)), None
        )

    def dataset(self, name: object) -> KnownDataset | None:
        return next((one for one in self.datasets if one.name == name), None)


@cache
def facts() -> Facts:
    text = files("shardmark.analysis.studies").joinpath(FACTS_FILE).read_text(encoding="utf-8")
    return Facts.model_validate(parse_yaml(text, FACTS_FILE))
