"""The sections of the experiment file that every trial carries.  Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self, get_origin

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    PositiveFloat,
    PositiveInt,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)
from pydantic_core import CoreSchema, InitErrorDetails, PydanticCustomError

UserPath = Annotated[str, Field(pattern=r"^.+:[A-Za-z_]\w*$")]


def _require_fixed_name(schema: dict[str, Any]) -> None:
    """An editor tells the members of a union apart by their names, so these must be given."""
    if "const" in schema.get("properties", {}).get("name", {}):
        schema["required"] = list(dict.fromkeys(["name", *schema.get("required", ())]))


class Model(BaseModel):
    """Frozen; unknown keys, infinities and truth values in place of numbers are errors."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        protected_namespaces=(),
        json_schema_extra=_require_fixed_name,
    )

    @model_validator(mode="before")
    @classmethod
    def _no_truth_value_as_number(cls, data: Any) -> Any:
        if isinstance(data, Mapping):
            mistakes = [
                InitErrorDetails(
                    type=PydanticCustomError(
                        "value_error",
                        "{error}",
                        {"error": f"found {str(value).lower()}; this key is not a yes or no"},
                    ),
                    loc=(key,),
                    input=value,
                )
                for key, value in data.items()
                if isinstance(value, bool)
                and key in cls.model_fields
                and cls.model_fields[key].annotation not in (bool, Any)
                and get_origin(cls.model_fields[key].annotation) is not Literal  # which lists them
            ]
            if mistakes:
                raise ValidationError.from_exception_data(cls.__name__, mistakes)
        return data


class Choice(Model):
    """One of several by `name`: keys of the others are refused, and not written out."""

    KEYS: ClassVar[dict[str, tuple[str, ...]]]
    """Keys that only some names have, by name."""
    name: str

    @classmethod
    def foreign_keys(cls, name: str) -> list[str]:
        """Keys that say nothing about the choice of this name."""
        owned = {key for keys in cls.KEYS.values() for key in keys}
        return [key for key in cls.model_fields if key in owned.difference(cls.KEYS[name])]

    @model_validator(mode="after")
    def _only_own_keys(self) -> Self:
        foreign = self.foreign_keys(self.name)
        given = [key for key in foreign if key in self.model_fields_set]
        if given:
            own = [key for key in type(self).model_fields if key not in foreign]
            raise ValueError(
                f"{self.name} has no {' and no '.join(given)}; "
                f"leave it out: the keys of {self.name} are {', '.join(own)}"
            )
        if self.name == "own" and getattr(self, "path", None) is None:
            raise ValueError("own without path; give path, e.g. torch.optim:RMSprop")
        return self

    @model_serializer(mode="wrap")
    def _without_foreign_keys(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        foreign = self.foreign_keys(self.name)
        return {key: value for key, value in handler(self).items() if key not in foreign}


Decay = Annotated[float, Field(ge=0, lt=1)]
_OWN_KEYS = ("path", "options")
_ADAM_KEYS = ("betas", "eps", "weight_decay", "implementation")


class Optimizer(Choice):
    """The optimizer with every default written out."""

    KEYS = {
        "sgd": ("momentum", "dampening", "nesterov", "weight_decay", "implementation"),
        "adam": _ADAM_KEYS,
        "adamw": _ADAM_KEYS,
        "own": _OWN_KEYS,
    }
    name: Literal["sgd", "adam", "adamw", "own"] = "sgd"
    """`own`: any class of torch's kind, by `path`.  Sharded strategies give it parts of tensors, so
    it has to work element by element: `verify` finds one that does not."""
    lr: PositiveFloat = 0.01
    momentum: Decay = 0.0
    """SGD only."""
    dampening: Decay = 0.0
    """SGD only."""
    nesterov: bool = False
    """SGD only."""
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    """Adam and AdamW only."""
    eps: PositiveFloat = 1e-8
    """Adam and AdamW only."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """The same for every parameter, biases and norms included, unless a task of the user's has
    `parameter_groups`."""
    implementation: Literal["default", "foreach", "fused"] = "default"
    """How torch's own three update: all parameters in a few operators (`foreach`), in one kernel
    (`fused`), or as torch chooses.  The same mathematics; `own` takes it among its options."""
    path: UserPath | None = None
    """`own` only: `torch.optim:RMSprop`, `package.module:Class` or `folder/file.py:Class`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """`own` only: keyword arguments beside `lr`."""

    @model_validator(mode="after")
    def _nesterov_has_momentum(self) -> Optimizer:
        if self.nesterov and (self.momentum == 0 or self.dampening != 0):
            raise ValueError(
                f"nesterov with momentum {self.momentum:g} and dampening {self.dampening:g}; "
                "nesterov needs a momentum above 0 and no dampening"
            )
        return self


class Schedule(Choice):
    """Learning rate over the steps of the training, as a factor on `optimizer.lr`."""

    KEYS = {
        "constant": (),
        "linear": ("end_factor",),
        "cosine": ("end_factor",),
        "step": ("every_steps", "gamma"),
        "own": _OWN_KEYS,
    }
    name: Literal["constant", "linear", "cosine", "step", "own"] = "constant"
    """`own`: a class of `torch.optim.lr_scheduler`, or a function that makes one, by `path`."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Linear rise over so many steps first (no relation to `measure.warmup_steps`).  `linear`,
    `cosine` and `own` begin after it."""
    end_factor: Annotated[float, Field(ge=0, le=1)] = 0.0
    """`linear` and `cosine` only: what the factor falls to, one step after the last."""
    every_steps: PositiveInt | None = None
    """`step` only: multiply by `gamma` each time so many steps have been taken."""
    gamma: Annotated[float, Field(gt=0, le=1)] = 0.1
    """`step` only."""
    path: UserPath | None = None
    """`own` only: `torch.optim.lr_scheduler:OneCycleLR`, `package.module:function`, ..."""
    options: dict[str, Any] = Field(default_factory=dict)
    """`own` only: keyword arguments beside the optimizer.  The text `steps` as a value stands for
    the number of steps after the warm-up."""

    @model_validator(mode="after")
    def _step_has_steps(self) -> Schedule:
        if self.name == "step" and self.every_steps is None:
            raise ValueError("step without every_steps; give every_steps, a positive whole number")
        return self


Precision = Literal["fp32", "bf16", "fp16"]


EXCLUSIVE = (("global_batch", "per_rank_batch"), ("epochs", "steps"))
"""Keys of the recipe of which exactly one is given."""


class Recipe(Model):
    """How to train: the same in every trial, unless one of these keys is an axis of the matrix."""

    global_batch: PositiveInt | None = None
    """Samples per optimizer step over all ranks.  Exactly one of this and `per_rank_batch`."""
    per_rank_batch: PositiveInt | None = None
    """Samples per optimizer step and rank: weak scaling, which changes the mathematics."""
    epochs: PositiveInt | None = None
    """Passes over the training set.  Exactly one of this and `steps`."""
    steps: PositiveInt | None = None
    optimizer: Optimizer = Optimizer()
    schedule: Schedule = Schedule()
    precision: Precision = "fp32"
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    gradient_accumulation: PositiveInt = 1
    """Micro-batches per optimizer step and rank; `global_batch` counts all of them."""
    gradient_clipping: PositiveFloat | None = None
    """Largest 2-norm of all gradients together; null clips nothing, in every strategy."""
    sync_batch_norm: bool = False
    """Batch norm takes the statistics of each micro-batch over all ranks, as torch's
    `SyncBatchNorm`: else of each rank's share of it."""
    activation_checkpointing: bool = False
    cpu_offload: bool = False
    compile: Literal["none", "blocks", "model"] = "none"
    """torch.compile of each repeated block, or of the whole model in one piece.  The same
    mathematics and draws, in other kernels; compiled anew in each trial."""
    channels_last: bool = False
    """Pictures, and weights where the strategy leaves them whole, in memory pixel by pixel with all
    channels of one together.  The same mathematics; for models with convolutions."""
    tf32: bool = False
    """Allow TensorFloat-32 in CUDA matrix products and convolutions."""
    threads_per_rank: PositiveInt | None = None
    """CPU threads of each rank's operators; null shares the machine's cores out evenly."""

    @model_validator(mode="after")
    def _exactly_one(self) -> Recipe:
        for first, second in EXCLUSIVE:
            given = [name for name in (first, second) if getattr(self, name) is not None]
            if len(given) != 1:
                found = "both are given" if given else "neither is given"
                raise ValueError(f"{found}; give exactly one of {first} and {second}")
        return self


MOST_REPEATS = 1000
_REPEATS_ALLOWED = "allowed is a whole number, or {at_least: 3, at_most: 6, until: 0.05}"


class Repeats(Model):
    """How often each cell is measured: a number, or until it is known."""

    at_least: Annotated[int, Field(ge=1, le=MOST_REPEATS)] = 3
    """Two give an interval, three one that is of use."""
    at_most: Annotated[int, Field(ge=1, le=MOST_REPEATS)] = 6
    until: Annotated[float, Field(gt=0, lt=1)] = 0.05
    """A cell ends once half the 95 % interval of its rate is below this share of it, or
    once its comparisons are decided."""

    @model_validator(mode="before")
    @classmethod
    def _a_number_alone(cls, data: Any) -> Any:
        if isinstance(data, int) and not isinstance(data, bool):
            return {"at_least": data, "at_most": data}
        if isinstance(data, Mapping | Repeats):
            return data
        raise ValueError(f"found {data!r}; {_REPEATS_ALLOWED}")

    @model_validator(mode="after")
    def _in_order(self) -> Repeats:
        if self.at_least > self.at_most:
            found = f"found at_least {self.at_least} above at_most {self.at_most}"
            raise ValueError(f"{found}; raise at_most")
        return self

    @model_serializer(mode="wrap")
    def _number_where_fixed(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any] | int:
        fields: dict[str, Any] = handler(self)
        return fields if self.adaptive else self.at_least

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        number = {"type": "integer", "minimum": 1, "maximum": MOST_REPEATS}
        return {"anyOf": [number, handler.resolve_ref_schema(handler(schema))]}

    @property
    def adaptive(self) -> bool:
        return self.at_least < self.at_most

    def __str__(self) -> str:
        """`3`, or `3 to 6`."""
        return f"{self.at_least} to {self.at_most}" if self.adaptive else str(self.at_least)


GPU_WARMUP_SECONDS = 5.0
GPU_WINDOW_SECONDS = 15.0
"""Clocks have settled, and a sampled power is a mean of thirty readings."""


class Measure(Model):
    """What is measured, and how often."""

    warmup_steps: Annotated[int, Field(ge=0)] = 5
    """First steps of the training that are left out of every performance metric, at least."""
    warmup_seconds: Annotated[float, Field(ge=0, le=3600)] | None = None
    """More steps are left out until they have lasted so long.  null: 5 on a GPU, 0 on a CPU."""
    window_seconds: Annotated[float, Field(ge=0, le=86400)] | None = None
    """So long is measured at least: where the recipe is shorter, steps are added after its end.
    null: 15 on a GPU, 0 on a CPU."""
    repeats: Repeats = Repeats()
    """Number of times that each cell is measured, in random order: by default until it is known, 3
    to 6 times."""
    max_remeasure: Annotated[int, Field(ge=0, le=100)] = 2
    """How often a trial that other work disturbed is measured again, before it stays marked."""
    sample_seconds: Annotated[float, Field(ge=0.05, le=60)] = 0.5
    """Period of the system metrics, sampled from outside the ranks."""
    probe: bool = True
    """After the training, take untimed steps that count memory, collectives and communication."""
    verify: bool = True
    """Before the first trial, prove with a few steps that the strategies train the same thing."""
    twin: bool = True
    """Train the baseline's cell once more from initial weights that are changed by one rounding, to
    measure what rounding alone does to the quality; where strategies are verified and evaluated."""
    evaluate: Literal["epoch", "end", "never"] = "epoch"
    """When the whole validation set is evaluated; never inside a measured window."""
    link_seconds: Annotated[float, Field(ge=0, le=600)] | None = None
    """Time for measuring the links between the ranks once, before the first trial; 0 leaves it out.
    null: 8 where trials have several nodes, else 0."""


class Limits(Model):
    """Bounds on one trial."""

    trial_seconds: PositiveFloat = 1800
    """All restarts included."""
    max_restarts: Annotated[int, Field(ge=0, le=1000)] = 0
    """How often the ranks are started anew after some have died; 0 writes no checkpoints."""
    checkpoint_steps: PositiveInt = 100
    """Steps between two checkpoints, from which restarted ranks go on."""
    checkpoint_dir: str | None = None
    """Folder for checkpoints, below which each node has its own; null: the trial's folder, and on
    other nodes the one for temporary files.  They are removed when the trial has ended."""
    node_return_seconds: Annotated[float, Field(ge=0, le=86400)] = 0
    """With `max_restarts`: how long a trial waits for a lost node, or another in its place."""


MOST_RANKS = 2**16
"""A world size above this is a slip of the hand."""


class Placement(Model):
    """Where the training ranks sit; beside `world_size`, which is `nodes` x `ranks_per_node`.

    Any of the three follows from the others.
    """

    nodes: Annotated[PositiveInt, Field(le=MOST_RANKS)] | None = None
    """Machines of a trial; one if nothing says otherwise."""
    ranks_per_node: Annotated[PositiveInt, Field(le=MOST_RANKS)] | None = None
    """Training ranks on each of them; parameter servers come on top."""


SlowRanks = dict[Annotated[int, Field(ge=0)], Annotated[float, Field(ge=1, le=1000)]]
"""Rank -> factor by which its computing is slowed."""
