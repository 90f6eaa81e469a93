"""Sections of the experiment file that are part of every trial.  Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self, get_args, get_origin

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    PositiveFloat,
    PositiveInt,
    SerializationInfo,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)
from pydantic_core import CoreSchema, InitErrorDetails, PydanticCustomError

from shardmark.base.evidence.accepted import USUAL, AcceptableCause

UserPath = Annotated[str, Field(pattern=r"^.+:[A-Za-z_]\w*$")]


def _require_fixed_name(schema: dict[str, Any]) -> None:
    """Require `name` in the JSON schema, by which an editor distinguishes members of a union."""
    if "const" in schema.get("properties", {}).get("name", {}):
        schema["required"] = list(dict.fromkeys(["name", *schema.get("required", ())]))


def _takes_truth_values(annotation: Any) -> bool:
    """Return whether a boolean is allowed, or its type names what is allowed."""
    kinds = (bool, Any)
    return annotation in kinds or bool in get_args(annotation) or get_origin(annotation) is Literal


class Model(BaseModel):
    """Frozen model that rejects unknown keys, infinities, and booleans in place of numbers."""

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
                and not _takes_truth_values(cls.model_fields[key].annotation)
            ]
            if mistakes:
                raise ValidationError.from_exception_data(cls.__name__, mistakes)
        return data


class Choice(Model):
    """Model whose `name` selects a choice.  Keys of the other choices are rejected."""

    KEYS: ClassVar[dict[str, tuple[str, ...]]]
    """Keys that are specific to a choice, by name."""
    DEFAULTS: ClassVar[dict[str, dict[str, Any]]] = {}
    """Defaults of a choice that differ from those of the fields, by name."""
    name: str

    @classmethod
    def foreign_keys(cls, name: str) -> list[str]:
        """Return the keys that belong only to other choices than this name."""
        specific = {key for keys in cls.KEYS.values() for key in keys}
        return [key for key in cls.model_fields if key in specific.difference(cls.KEYS[name])]

    @model_validator(mode="before")
    @classmethod
    def _with_defaults_of_choice(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        return {**cls.DEFAULTS.get(str(data.get("name")), {}), **data}

    @model_validator(mode="after")
    def _only_own_keys(self) -> Self:
        foreign = self.foreign_keys(self.name)
        unexpected = [key for key in foreign if key in self.model_fields_set]
        if unexpected:
            allowed = [key for key in type(self).model_fields if key not in foreign]
            raise ValueError(
                f"{self.name} has no {' and no '.join(unexpected)}; "
                f"leave it out: the keys of {self.name} are {', '.join(allowed)}"
            )
        if self.name == "own" and getattr(self, "path", None) is None:
            raise ValueError("own without path; give path, e.g. torch.optim:RMSprop")
        return self

    @model_serializer(mode="wrap")
    def _without_foreign_keys(
        self, handler: SerializerFunctionWrapHandler, info: SerializationInfo
    ) -> dict[str, Any]:
        left_out = {*self.foreign_keys(self.name)}
        defaults = self.DEFAULTS.get(self.name, {}) if info.exclude_defaults else {}
        changed = {key: getattr(self, key) for key in defaults}
        values: dict[str, Any] = handler(self) | changed
        left_out |= {key for key, default in defaults.items() if values[key] == default}
        return {key: value for key, value in values.items() if key not in left_out}


Decay = Annotated[float, Field(ge=0, lt=1)]
_OWN_KEYS = ("path", "options")
_ADAM_KEYS = ("betas", "eps", "weight_decay", "implementation")


class Optimizer(Choice):
    """The optimizer, with every default stored explicitly."""

    KEYS = {
        "sgd": ("momentum", "dampening", "nesterov", "weight_decay", "implementation"),
        "adam": (*_ADAM_KEYS, "state_bits"),
        "adamw": (*_ADAM_KEYS, "state_bits"),
        "adafactor": ("weight_decay",),
        "muon": ("momentum", "nesterov", *_ADAM_KEYS, "adamw_lr", "adjust_lr_fn"),
        "lamb": ("betas", "eps", "weight_decay"),
        "own": _OWN_KEYS,
    }
    DEFAULTS = {"muon": {"momentum": 0.95, "nesterov": True}, "lamb": {"eps": 1e-6}}
    name: Literal["sgd", "adam", "adamw", "adafactor", "muon", "lamb", "own"] = "sgd"
    """`muon`: Muon for the matrices of the blocks, AdamW for embeddings, output layers, vectors
    and convolutions.  `own`: a subclass of `torch.optim.Optimizer`, by `path`.  Sharded strategies
    pass it shards of tensors, so it must work element by element; `verify` detects one that does
    not.  They refuse `adafactor`, `muon` and `lamb`."""
    lr: PositiveFloat = 0.01
    momentum: Decay = 0.0
    """SGD and Muon only; 0.95 for Muon."""
    dampening: Decay = 0.0
    """SGD only."""
    nesterov: bool = False
    """SGD and Muon only; true for Muon."""
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    """Adam, AdamW, also that of Muon, and LAMB only."""
    eps: PositiveFloat = 1e-8
    """Adam, AdamW, also that of Muon, and LAMB only; 1e-6 for LAMB."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Applies to every parameter, biases and norms included, unless the user's task defines
    `parameter_groups`."""
    implementation: Literal["default", "foreach", "fused"] = "default"
    """Implementation of `sgd`, `adam`, `adamw` and Muon's AdamW: a few operators for all parameters
    (`foreach`), one kernel (`fused`), or torch's choice.  The result is the same up to rounding.
    Optimizers by `path` take it among their options."""
    state_bits: Literal[32, 8] = 32
    """Adam and AdamW only.  8: both averages in 8 bits, with a scale for each block of 256 values,
    as bitsandbytes stores them.  Only `plan` knows it."""
    adamw_lr: PositiveFloat | None = None
    """Muon only: learning rate of its AdamW; null: `lr`.  The schedule applies to both."""
    adjust_lr_fn: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """Muon only: factor of the learning rate of a matrix, as in `torch.optim.Muon`.
    `match_rms_adamw` makes updates as large as those of AdamW, so that one `lr` suits both."""
    path: UserPath | None = None
    """`own` only: `torch.optim:RMSprop`, `package.module:Class` or `folder/file.py:Class`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """`own` only: keyword arguments in addition to `lr`."""

    @property
    def needs_full_tensors(self) -> bool:
        """True if an update of a part of a tensor differs from that part of the tensor's update."""
        return self.name in ("adafactor", "muon", "lamb")

    @model_validator(mode="after")
    def _nesterov_has_momentum(self) -> Optimizer:
        if self.nesterov and (self.momentum == 0 or self.dampening != 0):
            raise ValueError(
                f"nesterov with momentum {self.momentum:g} and dampening {self.dampening:g}; "
                "nesterov needs a momentum above 0 and no dampening"
            )
        return self


class Schedule(Choice):
    """The learning rate over the steps of the training, as a factor of `optimizer.lr`."""

    KEYS = {
        "constant": (),
        "linear": ("end_factor",),
        "cosine": ("end_factor",),
        "step": ("every_steps", "gamma"),
        "own": _OWN_KEYS,
    }
    name: Literal["constant", "linear", "cosine", "step", "own"] = "constant"
    """`own`: a class of `torch.optim.lr_scheduler`, or a function that returns one, by `path`."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps of a linear warm-up, after which `linear`, `cosine` and `own` begin.  Not related to
    `measure.warmup_steps`."""
    end_factor: Annotated[float, Field(ge=0, le=1)] = 0.0
    """`linear` and `cosine` only: the factor that is reached one step after the last step."""
    every_steps: PositiveInt | None = None
    """`step` only: number of steps after which the factor is multiplied by `gamma`."""
    gamma: Annotated[float, Field(gt=0, le=1)] = 0.1
    """`step` only."""
    path: UserPath | None = None
    """`own` only: `torch.optim.lr_scheduler:OneCycleLR`, `package.module:function`, ..."""
    options: dict[str, Any] = Field(default_factory=dict)
    """`own` only: keyword arguments in addition to the optimizer.  The value `steps` stands for the
    number of steps after the warm-up."""

    @model_validator(mode="after")
    def _step_has_steps(self) -> Schedule:
        if self.name == "step" and self.every_steps is None:
            raise ValueError("step without every_steps; give every_steps, a positive whole number")
        return self


Precision = Literal["fp32", "bf16", "fp16"]
Weights = Literal["fp32", "bf16"]


EXCLUSIVE = (("global_batch", "per_rank_batch"), ("epochs", "steps"))
"""Keys of the recipe of which exactly one is given, unless the workload trains by itself."""
OF_SCRIPTS = frozenset({"steps", "seed", "threads_per_rank"})
"""Keys of the recipe for a workload that trains by itself; it decides the others."""


class Recipe(Model):
    """Training settings: the same in every trial, unless a key is an axis of the matrix."""

    global_batch: PositiveInt | None = None
    """Samples per optimizer step of all ranks together.  Give either this or `per_rank_batch`."""
    per_rank_batch: PositiveInt | None = None
    """Samples per optimizer step and rank.  The global batch, and with it the training, then
    depends on the number of ranks (weak scaling)."""
    epochs: PositiveInt | None = None
    """Passes over the training set.  Give either this or `steps`."""
    steps: PositiveInt | None = None
    optimizer: Optimizer = Optimizer()
    schedule: Schedule = Schedule()
    precision: Precision = "fp32"
    weights: Weights = "fp32"
    """Type of the parameters, and so of gradients, optimizer state and messages of both.  With
    `bf16` there is no fp32 copy of the weights, and the model computes in bf16 without autocast:
    `precision: fp32` becomes `bf16`.  Buffers, losses and evaluations stay in fp32."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    gradient_accumulation: PositiveInt = 1
    """Micro-batches per optimizer step and rank; `global_batch` includes all of them."""
    gradient_clipping: PositiveFloat | None = None
    """Maximum 2-norm of all gradients together; null disables clipping in every strategy."""
    sync_batch_norm: bool = False
    """Compute batch-norm statistics of each micro-batch over all ranks, as torch's
    `SyncBatchNorm`; otherwise over each rank's share."""
    activation_checkpointing: bool | Literal["selective"] | Annotated[int, Field(ge=2)] = False
    """Recompute blocks in the backward pass instead of saving their activations: all of them, or
    every n-th one (`2`, `3`, ...).  `selective` saves results of attention and of every second
    product, and recomputes the rest, as torchtitan does by default."""
    cpu_offload: bool = False
    compile: Literal["none", "blocks", "model"] = "none"
    """Apply torch.compile to each repeated block or to the full model.  Results and random draws
    are the same up to rounding; every trial compiles again."""
    channels_last: bool = False
    """Use the channels_last memory format for images, and for weights that the strategy does not
    shard.  Results are the same up to rounding; for models with convolutions."""
    tf32: bool = False
    """Allow TensorFloat-32 in CUDA matrix products and convolutions."""
    threads_per_rank: PositiveInt | None = None
    """CPU threads for the operators of each rank; null divides a machine's cores by the
    ranks of the largest cell."""

    @model_validator(mode="before")
    @classmethod
    def _computes_in_type_of_weights(cls, data: Any) -> Any:
        if not isinstance(data, Mapping) or data.get("weights") != "bf16":
            return data
        if data.get("precision") == "fp16":
            problem = "weights are bf16 and precision is fp16, whose loss scale needs fp32 weights"
            raise ValueError(f"{problem}; set precision: bf16, or weights: fp32")
        return {**data, "precision": "bf16"} if data.get("precision") in ("fp32", None) else data

    @model_validator(mode="after")
    def _exactly_one(self) -> Recipe:
        if (self.global_batch, self.per_rank_batch, self.epochs) != (None, None, None):
            self.check_complete()
        return self  # without these, of a script; the experiment refuses it for other workloads

    def check_complete(self) -> None:
        """Raise `ValueError` unless the recipe has one kind of batch and one length."""
        for first, second in EXCLUSIVE:
            keys = [name for name in (first, second) if getattr(self, name) is not None]
            if len(keys) != 1:
                problem = "both are given" if keys else "neither is given"
                raise ValueError(f"{problem}; give exactly one of {first} and {second}")

    def check_script(self) -> None:
        """Raise `ValueError` for a key that a script decides."""
        for key, value in self:
            if key not in OF_SCRIPTS and value != type(self).model_fields[key].default:
                allowed = ", ".join(sorted(OF_SCRIPTS))
                raise ValueError(f"{key} is set, which the script decides; allowed: {allowed}")


MAX_REPEATS = 1000
_REPEATS_ALLOWED = "allowed is a whole number, or {at_least: 3, at_most: 6, until: 0.05}"


class Repeats(Model):
    """Number of times that each cell is measured: fixed, or until the result is precise enough."""

    at_least: Annotated[int, Field(ge=1, le=MAX_REPEATS)] = 3
    """Minimum number of repeats.  Two give a confidence interval, three a useful one."""
    at_most: Annotated[int, Field(ge=1, le=MAX_REPEATS)] = 6
    until: Annotated[float, Field(gt=0, lt=1)] = 0.05
    """A cell ends when half the width of its throughput's 95 % interval is below this fraction of
    the throughput, or when its comparisons are decided."""

    margin: Annotated[float, Field(gt=0, lt=1)] | None = None
    """A race: cells end when their speed is shown to differ from the first variant's, or to differ
    by less than this fraction."""

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
            problem = f"found at_least {self.at_least} above at_most {self.at_most}"
            raise ValueError(f"{problem}; raise at_most")
        return self

    @model_serializer(mode="wrap")
    def _number_where_fixed(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any] | int:
        fields: dict[str, Any] = handler(self)
        return fields if self.adaptive else self.at_least

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        number = {"type": "integer", "minimum": 1, "maximum": MAX_REPEATS}
        return {"anyOf": [number, handler.resolve_ref_schema(handler(schema))]}

    @property
    def adaptive(self) -> bool:
        return self.at_least < self.at_most

    def __str__(self) -> str:
        """Format the number of repeats, such as `3` or `3 to 6`."""
        return f"{self.at_least} to {self.at_most}" if self.adaptive else str(self.at_least)


GPU_WARMUP_SECONDS = 5.0
GPU_WINDOW_SECONDS = 15.0
"""Long enough for stable clocks, and for a mean of thirty readings of the power."""
RACE_WINDOW_SECONDS = 2.0
"""Long enough for twenty turns of each candidate on a CPU."""


class Measure(Model):
    """Measurement settings."""

    warmup_steps: Annotated[int, Field(ge=0)] = 5
    """Minimum number of first steps that performance metrics exclude."""
    warmup_seconds: Annotated[float, Field(ge=0, le=3600)] | None = None
    """Minimum duration of the excluded steps.  null: 5 on a GPU, 0 on a CPU."""
    window_seconds: Annotated[float, Field(ge=0, le=86400)] | None = None
    """Minimum duration of the measured steps; a shorter recipe is extended by additional steps.
    null: 15 on a GPU, else 2 in a race, else 0."""
    repeats: Repeats = Repeats()
    """Number of times that each cell is measured, in random order.  By default 3 to 6 times, until
    the result is precise enough."""
    seeds: Annotated[int, Field(ge=1, le=MAX_REPEATS)] = 1
    """Number of seeds.  Above 1, each repeat trains with another seed: the first with
    `recipe.seed`, the second with the next number, and so on, equally in all cells.  `repeats` is
    then this number: `--set measure.seeds` replaces the `repeats` of a file or preset."""
    max_remeasure: Annotated[int, Field(ge=0, le=100)] = 2
    """Maximum number of new measurements of a trial that other work disturbed; after them it stays
    marked as disturbed."""
    sample_seconds: Annotated[float, Field(ge=0.05, le=60)] = 0.5
    """Sampling period of the system metrics, which are read outside of the ranks."""
    probe: bool = True
    """After the training, take untimed steps that count memory, collectives and communication."""
    verify: bool = True
    """Before the first trial, verify with a few steps that all strategies train the same model."""
    accept: tuple[AcceptableCause, ...] | None = None
    """Causes of a script's deviation that are no fault here; everything else is still compared.
    null: batch_norm_of_share.  []: none."""
    twin: bool = True
    """Train the baseline's cell once more from initial weights that differ by one rounding, to
    measure the effect of rounding on the quality.  Requires verification and evaluation."""
    evaluate: Literal["epoch", "end", "never"] = "epoch"
    """Time of evaluations on the full validation set; never inside a measured window."""
    link_seconds: Annotated[float, Field(ge=0, le=600)] | None = None
    """Time for measuring the links between the ranks before the first trial; 0 skips it.
    null: 8 for trials with several nodes, otherwise 0."""

    @property
    def accepted(self) -> tuple[AcceptableCause, ...]:
        return USUAL if self.accept is None else self.accept

    @model_validator(mode="before")
    @classmethod
    def _a_repeat_for_each_seed(cls, data: Any) -> Any:
        """Replace repeats that are adaptive, missing or too few by the number of seeds."""
        seeds = data.get("seeds") if isinstance(data, Mapping) else None
        if not isinstance(seeds, int) or not 1 < seeds <= MAX_REPEATS:
            return data
        repeats = data.get("repeats", Repeats())
        adaptive = isinstance(repeats, Mapping | Repeats)
        return {**data, "repeats": seeds} if adaptive or repeats in range(1, seeds) else data

    @model_validator(mode="after")
    def _as_many_repeats(self) -> Measure:
        repeats = self.repeats
        if self.seeds > 1 and (repeats.adaptive or repeats.at_least != self.seeds):
            problem = f"found seeds {self.seeds} and repeats {repeats}, and a repeat is a seed"
            raise ValueError(f"{problem}; leave out repeats, or set seeds to it")
        return self


RESTART_DEFAULTS: Mapping[str, object] = {
    "max_restarts": 0,
    "checkpoint_steps": 100,
    "checkpoint_dir": None,
    "node_return_seconds": 0,
}
"""Removed keys of `limits`, for restarts inside a trial, with the values that had no effect."""


class Limits(Model):
    """Bounds on one trial."""

    trial_seconds: PositiveFloat = 1800
    """Time limit of a trial, start and warm-up included."""

    @model_validator(mode="before")
    @classmethod
    def _without_restarts(cls, data: Any) -> Any:
        """Drop keys of restarts inside a trial, which stored experiments and trials may hold."""
        if not isinstance(data, Mapping):
            return data
        return {key: value for key, value in data.items() if key not in RESTART_DEFAULTS}


MAX_RANKS = 2**16
"""Larger world sizes are rejected as typing errors."""


class Placement(Model):
    """Placement of the training ranks.

    `world_size` is `nodes` x `ranks_per_node`; any of the three follows from the other two.
    """

    nodes: Annotated[PositiveInt, Field(le=MAX_RANKS)] | None = None
    """Number of machines of a trial; 1 by default."""
    ranks_per_node: Annotated[PositiveInt, Field(le=MAX_RANKS)] | None = None
    """Training ranks on each machine, not counting parameter servers."""


SlowRanks = dict[Annotated[int, Field(ge=0)], Annotated[float, Field(ge=1, le=1000)]]
"""Factor by which the computation of a rank is slowed down, by rank."""
