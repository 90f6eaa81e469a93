"""Optimizer and learning-rate schedule of the recipe; keys that say nothing are refused."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PositiveFloat,
    PositiveInt,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    field_validator,
    model_serializer,
    model_validator,
)

_SGD_KEYS = ("momentum", "dampening", "nesterov")
_ADAM_KEYS = ("betas", "eps")
_STEP_KEYS = ("every_steps", "gamma")


class Model(BaseModel):
    """Frozen; unknown keys, infinities and truth values in place of numbers are errors."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_value_as_number(cls, value: Any, info: ValidationInfo) -> Any:
        assert info.field_name is not None
        if isinstance(value, bool) and cls.model_fields[info.field_name].annotation not in (
            bool,
            Any,
        ):
            raise ValueError(f"found {str(value).lower()}; this key is not a yes or no")
        return value


class Optimizer(Model):
    """The optimizer with every default written out; keys of the other optimizer are refused."""

    name: Literal["sgd", "adam", "adamw"] = "sgd"
    lr: PositiveFloat = 0.01
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """SGD only."""
    dampening: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """SGD only."""
    nesterov: bool = False
    """SGD only."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Adam and AdamW only."""
    eps: PositiveFloat = 1e-8
    """Adam and AdamW only."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """The same for every parameter, biases and norms included: no library's groups."""

    @staticmethod
    def foreign_keys(name: str) -> tuple[str, ...]:
        """Keys that say nothing about the optimizer of this name."""
        return _ADAM_KEYS if name == "sgd" else _SGD_KEYS

    @field_validator("betas")
    @classmethod
    def _betas_below_one(cls, betas: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"found {list(betas)}; allowed are two numbers from 0 to below 1")
        return betas

    @model_validator(mode="after")
    def _only_own_keys(self) -> Optimizer:
        foreign = [key for key in self.foreign_keys(self.name) if key in self.model_fields_set]
        if foreign:
            own = [key for key in Optimizer.model_fields if key not in self.foreign_keys(self.name)]
            raise ValueError(
                f"{self.name} has no {' and no '.join(foreign)}; "
                f"leave it out: the keys of {self.name} are {', '.join(own)}"
            )
        if self.nesterov and (self.momentum == 0 or self.dampening != 0):
            raise ValueError(
                f"nesterov with momentum {self.momentum:g} and dampening {self.dampening:g}; "
                "nesterov needs a momentum above 0 and no dampening"
            )
        return self

    @model_serializer(mode="wrap")
    def _without_foreign_keys(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        foreign = self.foreign_keys(self.name)
        return {key: value for key, value in handler(self).items() if key not in foreign}


class Schedule(Model):
    """Learning rate over the steps of the training, as a factor on `optimizer.lr`."""

    name: Literal["constant", "cosine", "step"] = "constant"
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Linear rise over so many steps first (no relation to `measure.warmup_steps`)."""
    every_steps: PositiveInt | None = None
    """`step` only: multiply by `gamma` each time so many steps have been taken."""
    gamma: Annotated[float, Field(gt=0, le=1)] = 0.1
    """`step` only."""

    @model_validator(mode="after")
    def _only_own_keys(self) -> Schedule:
        if self.name == "step" and self.every_steps is None:
            raise ValueError("step without every_steps; give every_steps, a positive whole number")
        given = [key for key in _STEP_KEYS if key in self.model_fields_set]
        if self.name != "step" and given:
            raise ValueError(f"{self.name} has no {' and no '.join(given)}; only step has")
        return self

    @model_serializer(mode="wrap")
    def _without_foreign_keys(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        foreign = () if self.name == "step" else _STEP_KEYS
        return {key: value for key, value in handler(self).items() if key not in foreign}
