"""Strategies by properties: numerics and faults, held state, traffic, refusals.

Each row names a strategy, its options and a model.  A process group runs all rows of its size, all
recipes, or the detector.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardmark.base.recipe import Optimizer, Schedule
from shardmark.base.results.schema import CollectiveRecord, ProbeRecord
from shardmark.base.traffic import ModelSize, RequiredTraffic
from shardmark.extras.detection.options import DetectionOptions
from shardmark.ranks.costs import cost_model
from shardmark.ranks.costs.base import Cell
from shardmark.ranks.measure.memory.tensors import storage_bytes
from shardmark.ranks.measure.step.collectives import CollectiveCounter
from shardmark.ranks.measure.step.recorder import NoSpans, Spans
from shardmark.ranks.strategies import option_names
from shardmark.ranks.strategies.base import RankContext, Server, Worker
from shardmark.ranks.strategies.blocks import sharding_units
from shardmark.ranks.train.probe import HeldSpans, model_counts, probe
from shardmark.ranks.trial import Trial
from shardmark.ranks.workloads import TaskOptions, build_workload
from shardmark.ranks.workloads.base import BatchPlan, Workload
from shardmark.ranks.workloads.language.options import LanguageOptions
from shardmark.ranks.workloads.own.options import OwnOptions
from shardmark.ranks.workloads.vision.options import ClassificationOptions
from tests.distributed import captures, faults
from tests.distributed.captures import (
    GROUPED,
    PADDED,
    RECIPES,
    SHIPPED,
    SYNCHRONISED,
    WORKLOAD,
    Case,
    own,
    recipe,
    trial,
)

Options = dict[str, Any]
ADAM = Optimizer(name="adamw", lr=1e-3, weight_decay=0.1)
ADAMW = {"optimizer": ADAM}
CLIPPED = {"gradient_clipping": 0.1}
SGD = {"optimizer": Optimizer(name="sgd", lr=0.05, momentum=0.9)}
FULL_TENSORS = ("adafactor", "lamb", "muon")
"""Optimizers whose updates depend on full tensors."""
ACCUMULATED = {"gradient_accumulation": 2}
SELECTIVE = {"activation_checkpointing": "selective"}
EVERY_SECOND = {"activation_checkpointing": 2}
AGAIN = ACCUMULATED | {"activation_checkpointing": True}
BF16, FP16 = {"precision": "bf16"}, {"precision": "fp16"}
BF16_WEIGHTS = {"weights": "bf16"}


def of_name(name: str) -> Optimizer:
    return Optimizer.model_validate({"name": name, "lr": 1e-3, "weight_decay": 0.1})


# Models


def picture_model(name: str) -> ClassificationOptions:
    return WORKLOAD.model_copy(update={"model": f"tests.distributed.models:{name}"})


LOUD, WIDE = picture_model("Loud"), picture_model("wide")
VISION = ClassificationOptions(
    model="vit_cifar",
    model_options={"num_layers": 3, "hidden_dim": 32, "mlp_dim": 64},
    dataset="digits",
    validation_samples=100,
)
"""A model whose class token and positions are in no layer, but in the model and its encoder."""
AVERAGED = OwnOptions(task="tests.distributed.models:MovingAverage")
PADDED_SEQUENCES = OwnOptions(task="tests.distributed.models:PaddedSequences")
SHARED_SEQUENCES = OwnOptions(task="tests.distributed.models:SharedSequences")


def language(folder: Path, **fields: Any) -> LanguageOptions:
    common = {"dataset": "text", "data_dir": str(folder / "texts"), "sequence_length": 24}
    sizes = {} if "model" in fields else {"width": 32, "heads": 4}
    return LanguageOptions.model_validate(common | sizes | fields)


def written_texts(folder: Path) -> Path:
    """Write the texts into a folder of their own: every file in it is read."""
    (folder / "texts").mkdir()
    for number in range(40):
        (folder / "texts" / f"{number:02}.txt").write_text(f"line {number}\n" * (10 + number % 7))
    return folder


def detector(folder: Path) -> DetectionOptions:
    """A two-stage detector."""
    return DetectionOptions(
        model="tests.distributed.models:small_detector",
        data_dir=str(folder / "digits"),
        validation_samples=8,
    )


def hugging_face(family: str, **fields: object) -> Options:
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4}
    return {"model": f"hf:{family}", "model_options": sizes | fields}


GROUPED_QUERIES = {"num_key_value_heads": 2, "intermediate_size": 64}
QWEN3 = hugging_face("qwen3", head_dim=8, **GROUPED_QUERIES)
TIED_QWEN3 = hugging_face("qwen3", head_dim=8, tie_word_embeddings=True, **GROUPED_QUERIES)
NEOX = hugging_face("gpt_neox", intermediate_size=64, hidden_dropout=0.1)
"""A model with dropout on activations that are not sharded."""
NEOX_WITHOUT_DROPOUT = hugging_face(
    "gpt_neox", intermediate_size=64, hidden_dropout=0, attention_dropout=0
)
NO_DROPOUT = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0)
GPT2 = hugging_face("gpt2", num_hidden_layers=3, **NO_DROPOUT)
BERT = hugging_face(
    "bert", intermediate_size=64, hidden_dropout_prob=0, attention_probs_dropout_prob=0
)
UNTIED = {"tied": False}
DEEP = {"layers": 4}
LEARNED = {"positions": "learned"}
DOCUMENTS = {"document_masks": True}
UNEVEN = {"packed": False, "objective": "masked"}
DROPOUT = {"dropout": 0.1}
CHUNKED = {"loss_chunks": 3}
LORA = {"adapter": {"name": "lora", "rank": 4}}
LORA_OF_BF16 = {"adapter": {"name": "lora", "rank": 4, "base": "bf16"}}
LANGUAGE_MODELS: dict[str, Options] = {
    "GPT-2": hugging_face("gpt2"),  # tied, and its dropout is 0.1
    "Llama": hugging_face("llama", **GROUPED_QUERIES) | DOCUMENTS,
    "BERT, uneven": hugging_face("bert", intermediate_size=64) | UNEVEN,
}
LARGE = {"vocabulary": 512, "sequence_length": 64}
LARGE_GPT = LARGE | {"width": 128, "layers": 2}
"""State and traffic are more than rounding."""

# Strategies

DDP, ZRO, FSDP, HYBRID = ({"name": name} for name in ("ddp", "zro", "fsdp", "fsdp-hybrid"))
TP, PP, DDP_PP, FSDP_PP = ({"name": name} for name in ("tp", "pp", "ddp-pp", "fsdp-pp"))
ZERO_BUBBLE, GPIPE, INTERLEAVED = (
    {"schedule": schedule} for schedule in ("zero-bubble", "gpipe", "interleaved")
)
BY_POSITION = {"sequence_parallel": True, "loss_parallel": True}
FSDP_TP: Options = {"name": "fsdp-tp", "mesh": {"shard": 2, "tensor": 2}}
TP_PP: Options = {"name": "fsdp-tp-pp", "mesh": {"tensor": 2, "pipeline": 2}}
DDP_TP: Options = {"name": "fsdp-tp-pp", "mesh": {"data": 2, "tensor": 2}}
ULYSSES, FSDP_ULYSSES = {"name": "ulysses"}, {"name": "fsdp-ulysses"}
DDP_ULYSSES: Options = ULYSSES | {"mesh": {"data": 2, "sequence": 2}}
SHARDED_ULYSSES: Options = FSDP_ULYSSES | {"mesh": {"shard": 2, "sequence": 2}}
EACH_PASS: Options = {"reduce_each_pass": True}
POWERSGD: Options = {"compress": "powersgd"}
IN_BF16: Options = {"compress": "bf16"}
SMALL_BUCKETS: Options = {"bucket_mb": 0.01}
"""Several, of which all but the first are filled anew after a process's first step."""
LOCAL_SGD: Options = {"name": "local-sgd", "period_steps": 2}
DILOCO: Options = {"name": "diloco", "period_steps": 2}
ROUNDS = {"steps": 5}
"""Two rounds of two steps, and the first step of a third."""
PS_SYNC: Options = {"name": "ps-sync", "ranks": 3}
TWO_SERVERS: Options = {"name": "ps-sync", "ranks": 2, "servers": 2}


Group = int | str
"""A process group: its size, or the name of another one."""
VARIANTS: dict[Group, Group] = {2: "variants on 2", 4: "variants on 4"}
"""Groups of the rows that the default run leaves out."""


def processes_of(group: Group) -> int:
    return group if isinstance(group, int) else 4 if group == VARIANTS[4] else 2


class Row(NamedTuple):
    """A strategy, changes of its recipe, a model or task, and a fault with its cause."""

    options: Options
    """Name of the strategy, its options, and `ranks` if some processes are servers."""
    changes: Options = {}  # noqa: RUF012  (nothing changes it)
    model: Options | TaskOptions | Callable[[Path], TaskOptions] = WORKLOAD
    begin: Any = None
    """Starts the worker with a fault."""
    cause: str | None = None
    """Cause that the verdict must name."""


def case_of(folder: Path, row: Row, group: Group) -> Case:
    """The row's trial; recipes of language models clip, and take Adam and small batches."""
    processes = processes_of(group)
    options: Options = {"ranks": processes} | row.options
    if isinstance(row.model, dict):
        workload: TaskOptions = language(folder, **row.model)
    else:
        workload = row.model(folder) if callable(row.model) else row.model
    if isinstance(workload, ClassificationOptions):
        common: Options = {"global_batch": 12 * options["ranks"]} if processes > 2 else {}
    else:
        small = 16 if "pp" in options["name"] else 8
        common = {"global_batch": small} | ADAMW | CLIPPED
    made = trial(options.pop("name"), recipe(**common | row.changes), workload=workload, **options)
    return Case(trial=made, begin=row.begin, cause=row.cause)


GPT: Options = {}
IN_BF16_PARAMETERS = ("fsdp", "fsdp-grad-op", "zero-1", "zero-2", "zero-3")
"""Strategies that cast parameters in bf16."""
WITH_LANGUAGE_MODELS = {
    **{name: tuple(LANGUAGE_MODELS) for name in ("zero-1", "zero-3", "ddp", "fsdp", "fsdp1")},
    **dict.fromkeys(("zero-0", "fsdp-grad-op", "zro"), ("GPT-2",)),
    "zero-2": ("BERT, uneven",),
}
ONE_GRADIENT = "only the gradients of some parameters are wrong"
OWN_TASK = {"global_batch": 32, "optimizer": captures.SGD, "gradient_clipping": None}
OWN_OPTIMIZER = {
    "optimizer": Optimizer(name="own", path="torch.optim:Adagrad", lr=0.01),
    "schedule": Schedule(
        name="own", path="torch.optim.lr_scheduler:ExponentialLR", options={"gamma": 0.5}
    ),
}
WITH_BF16_WEIGHTS = ("zero-1", "zero-2", "zero-3", "ddp", "zro", "fsdp", "fsdp-grad-op", "fsdp1")
MEAN_OF_MEANS = (
    "each rank divides its loss by its own weight (a mean of means), not by the whole step's"
)


def autocast(name: str, changes: Options) -> Options:
    """Options with which a strategy does not cast parameters in bf16."""
    casts = "mixed_precision" in option_names(name) and "precision" in changes
    return {"name": name} | ({"mixed_precision": "autocast"} if casts else {})


CAST: dict[str, Row] = {
    **{
        f"{name}, bf16 parameters, clipped": Row({"name": name}, BF16 | ACCUMULATED | CLIPPED)
        for name in IN_BF16_PARAMETERS
    },
    **{
        f"{name}, bf16 parameters, checkpointed": Row({"name": name}, BF16 | AGAIN | ADAMW)
        for name in ("fsdp", "zero-3")
    },
    **{
        f"{name}, bf16 parameters, own task": Row(
            {"name": name}, OWN_TASK | BF16 | ACCUMULATED, task
        )
        for name, task in (
            ("fsdp", own("regression")),
            ("zero-3", own("regression")),
            ("zero-1", GROUPED),
        )
    },
}
RECIPE_ROWS: dict[str, Row] = {
    **CAST,
    **{
        f"{name}, bf16 weights": Row({"name": name}, BF16_WEIGHTS | ACCUMULATED | CLIPPED)
        for name in WITH_BF16_WEIGHTS
    },
    "ddp, bf16 weights, synchronised": Row(DDP, BF16_WEIGHTS | SYNCHRONISED),
    "summed, bf16 weights": Row(
        *(DDP, BF16_WEIGHTS, WORKLOAD, faults.scaled(2.0)),
        "gradients are summed over the 2 ranks, not averaged",
    ),
    **{
        f"{name}, {label}": Row(autocast(name, changes), changes)
        for name in SHIPPED
        for label, changes in RECIPES.items()
    },
    **{
        f"{name}, own task {task}": Row({"name": name}, OWN_TASK | ACCUMULATED, options)
        for task, options, names in (
            ("tokens, with groups", GROUPED, ("ddp", "zro", "fsdp", "fsdp1", "zero-1", "zero-3")),
            ("regression", own("regression"), ("ddp",)),
            ("segmentation", own("segmentation"), ("fsdp",)),
        )
        for name in names
    },
    **{
        f"{name}, own optimizer and schedule": Row({"name": name}, OWN_OPTIMIZER)
        for name in ("zro", "fsdp", "fsdp1", "zero-1")
    },
    **{
        f"{name}, synchronised, {label}": Row({"name": name}, SYNCHRONISED | RECIPES[label])
        for label, names in (
            ("sgd", SHIPPED),
            ("bf16", ("ddp", "zero-3")),
            ("accumulated, checkpointed", ("ddp", "fsdp", "zero-3")),
        )
        for name in names
    },
    **{
        f"{options['name']}, weights of the loss, {parts} micro-batches": Row(
            options, OWN_TASK | {"gradient_accumulation": parts}, PADDED
        )
        for options in (DDP | IN_BF16, FSDP, {"name": "zero-2"}, {"name": "zero-3"})
        for parts in (1, 2)
    },
    **{
        fault: Row(
            DDP,
            {"gradient_accumulation": 4 if "accumulation" in fault else 1},
            WORKLOAD,
            begin,
            cause,
        )
        for fault, (begin, cause) in faults.FAULTS.items()
    },
    "mean of means": Row(DDP, OWN_TASK, own("tokens"), faults.mean_of_means, MEAN_OF_MEANS),
    "mean of means, weights of the loss": Row(
        DDP, OWN_TASK | ACCUMULATED, PADDED, faults.adds_no_weights, MEAN_OF_MEANS
    ),
    "norms kept apart": Row(
        *(DDP, SYNCHRONISED, WORKLOAD, faults.keeps_norms_apart),
        "batch norm takes its statistics over each rank's share",
    ),
    **{f"{name}, fp16": Row({"name": name}, FP16 | CLIPPED, LOUD) for name in SHIPPED},
}
"""Rows of every recipe.  Rows with autocast end: DeepSpeed keeps its type for later engines."""
DETECTION: Options = {
    "global_batch": 8,
    "optimizer": Optimizer(name="sgd", lr=0.02, momentum=0.9, weight_decay=5e-4),
    "gradient_clipping": None,
}
OTHER_DRAWS = "different random draws (proposal sampling)"
WITH_AVERAGES: dict[str, Options] = {
    "ddp": ACCUMULATED | ADAMW,
    "zro": {},
    "fsdp": ACCUMULATED | ADAMW,
    "fsdp-grad-op": BF16,
    "zero-1": {},
    "zero-2": ADAMW | ACCUMULATED,
}
"""Recipes by strategies that can train a task with `after_step`."""
ROWS: dict[Group, dict[str, Row]] = {
    "recipes": RECIPE_ROWS,
    "detection": {
        "ddp, detector": Row(DDP, DETECTION, detector),
        "zero-3, detector": Row({"name": "zero-3"}, DETECTION, detector),
        "fsdp, detector, synchronised": Row(FSDP, DETECTION | SYNCHRONISED, detector),
        "fsdp-grad-op, detector, again": Row({"name": "fsdp-grad-op"}, DETECTION | AGAIN, detector),
        "other seeds in one strategy": Row(
            DDP, DETECTION, detector, faults.other_seeds, OTHER_DRAWS
        ),
        "torchvision's sampler": Row(
            DDP, DETECTION, detector, faults.torchvisions_sampler, OTHER_DRAWS
        ),
    },
    1: {
        "single, GPT": Row({"name": "single"}, ACCUMULATED, DROPOUT | UNEVEN),
        "single, averaged": Row({"name": "single"}, {}, AVERAGED),
        "single, bf16 weights": Row({"name": "single"}, BF16_WEIGHTS | AGAIN, DROPOUT),
    },
    2: {
        **{
            f"{name}, GPT, bf16": Row({"name": name}, BF16, DROPOUT)
            for name in (*IN_BF16_PARAMETERS, "ddp")
        },
        **{
            f"{name}, GPT, bf16 weights": Row({"name": name}, BF16_WEIGHTS | AGAIN, DROPOUT)
            for name in WITH_BF16_WEIGHTS
        },
        **{
            f"{name}, LoRA, bf16 weights": Row({"name": name}, BF16_WEIGHTS, adapter | DEEP)
            for name, adapter in (("zero-3", LORA), ("fsdp1", LORA), ("fsdp", LORA_OF_BF16))
        },
        "zero-1, averaged, bf16 weights": Row({"name": "zero-1"}, BF16_WEIGHTS, AVERAGED),
        "ddp, Qwen3, bf16 weights": Row(DDP, BF16_WEIGHTS | ACCUMULATED, QWEN3 | CHUNKED),
        **{
            f"{name}, {model}": Row({"name": name}, AGAIN, LANGUAGE_MODELS[model])
            for name, models in WITH_LANGUAGE_MODELS.items()
            for model in models
        },
        **{
            f"zero-{stage}, frozen, {precision}": Row(
                {"name": f"zero-{stage}"}, {"precision": precision}, picture_model("frozen")
            )
            for stage in (1, 2, 3)
            for precision in ("fp32", "bf16")
        },
        **{f"{name}, LoRA": Row({"name": name}, AGAIN, LORA | DEEP) for name in SHIPPED},
        **{
            f"{name}, LoRA, bf16": Row({"name": name}, BF16, LORA_OF_BF16)
            for name in (*IN_BF16_PARAMETERS, "ddp")
        },
        "pp, LoRA": Row(PP, {}, LORA),
        **{
            f"{name}, averaged": Row({"name": name}, options, AVERAGED)
            for name, options in WITH_AVERAGES.items()
        },
        **{
            f"{name}, {label}": Row({"name": name}, changes, DROPOUT)
            for label, changes, names in (
                ("selective", SELECTIVE | ACCUMULATED, ("ddp", "fsdp", "fsdp1", "zero-2")),
                ("every second block", EVERY_SECOND | BF16, ("ddp", "fsdp", "zero-3")),
            )
            for name in names
        },
        **{f"{name}, chunked loss": Row({"name": name}, AGAIN, CHUNKED) for name in SHIPPED},
        "fsdp, reduced in each pass": Row(FSDP | EACH_PASS, AGAIN, GPT),
        "fsdp, reduced in each pass, bf16": Row(FSDP | EACH_PASS, ACCUMULATED | BF16, GPT),
        "fsdp-grad-op, reduced in each pass": Row(
            {"name": "fsdp-grad-op"} | EACH_PASS, ACCUMULATED | FP16 | CLIPPED, LOUD
        ),
        "fsdp1, reduced in each pass": Row({"name": "fsdp1"} | EACH_PASS, AGAIN, GPT),
        "fsdp, chunked loss of Qwen3, bf16": Row(FSDP, BF16, TIED_QWEN3 | CHUNKED),
        "ddp, chunked loss of BERT, uneven": Row(DDP, {}, BERT | UNEVEN | CHUNKED),
        **{
            f"{options['name']}, {name}": Row(options, {"optimizer": of_name(name)}, GPT)
            for names, strategies in (
                (FULL_TENSORS, (DDP, ZRO)),
                (("muon",), (PP, ULYSSES, {"name": "zero-0"})),
            )
            for name in names
            for options in strategies
        },
        "local-sgd, muon": Row(LOCAL_SGD, ROUNDS | {"optimizer": of_name("muon")}, GPT),
        "ddp, partly unused": Row(
            DDP | {"find_unused_parameters": True}, {}, picture_model("PartlyUsed")
        ),
        "zro, compress bf16": Row(ZRO | IN_BF16, ADAMW),
        "zro, powersgd": Row(ZRO | POWERSGD),
        "ddp, compress bf16": Row(DDP | IN_BF16, ACCUMULATED | CLIPPED),
        "ddp, compress fp16": Row(DDP | {"compress": "fp16", "static_graph": True}, ADAMW),
        "ddp, compress bf16 in a recipe of fp16": Row(DDP | IN_BF16, FP16, LOUD),
        "ddp, powersgd": Row(DDP | POWERSGD, ACCUMULATED | CLIPPED),
        "ddp, powersgd of rank 3, small buckets": Row(
            DDP | POWERSGD | {"powersgd_rank": 3} | SMALL_BUCKETS, ADAMW
        ),
        "ddp, powersgd in a recipe of bf16": Row(DDP | POWERSGD | {"static_graph": True}, BF16),
        "ddp, not compressed": Row(
            *(DDP | IN_BF16, {}, WORKLOAD, faults.ddp),
            "gradients are not reduced in bf16",
        ),
        "ddp, no powersgd": Row(
            *(DDP | POWERSGD, {}, WORKLOAD, faults.ddp),
            "it computes as one device does, although its definition is: "
            "gradients are reduced by PowerSGD of rank 1",
        ),
        "ddp, powersgd without error feedback": Row(
            *(DDP | POWERSGD, {}, WORKLOAD, faults.forgets_errors),
            "no known explanation reproduces the numbers",
        ),
        **{
            f"local-sgd, {label}": Row(LOCAL_SGD, ROUNDS | RECIPES[label])
            for label in ("sgd", "clipped", "accumulated, checkpointed")
        },
        "local-sgd, bf16 weights": Row(LOCAL_SGD, ROUNDS | BF16_WEIGHTS),
        "diloco, bf16 weights": Row(DILOCO, ROUNDS | BF16_WEIGHTS | ADAMW),
        "local-sgd, fp16": Row(LOCAL_SGD, FP16 | {"steps": 8}, LOUD),
        "local-sgd, groups": Row(LOCAL_SGD, ROUNDS | ACCUMULATED, GROUPED),
        "diloco, sgd": Row(DILOCO, ROUNDS),
        "diloco, adamw, clipped": Row(DILOCO, ROUNDS | CLIPPED | ADAMW),
        "diloco, fragments": Row(DILOCO | {"fragments": 2}, ROUNDS | ADAMW),
        "diloco, heavy ball": Row(DILOCO | {"outer_nesterov": False}, ROUNDS),
        "diloco, plain": Row(DILOCO | {"outer_momentum": 0.0}, ROUNDS),
        "diloco, groups": Row(DILOCO, ROUNDS, GROUPED),
        "diloco, first round discarded": Row(
            *(DILOCO, ROUNDS, WORKLOAD, faults.first_round_discarded),
            "only rank 0's steps of the first round are used: the others are discarded",
        ),
        "tp, tied": Row(TP, AGAIN, GPT),
        "tp, learned positions, uneven": Row(TP, SGD, LEARNED | UNEVEN),
        "tp, untied, sequence, loss": Row(TP | BY_POSITION, AGAIN, UNTIED),
        "tp, bf16": Row(TP, BF16, GPT),
        "tp, bf16 weights": Row(TP, BF16_WEIGHTS | AGAIN, GPT),
        "tp, bf16 weights, sequence, loss": Row(TP | BY_POSITION, BF16_WEIGHTS, UNTIED),
        "tp, bf16 weights, vision transformer": Row(TP, BF16_WEIGHTS | ADAMW, VISION),
        "tp, fp16": Row(TP, FP16, GPT),
        "tp, tied Qwen3": Row(TP, {}, TIED_QWEN3),
        "tp, GPT-NeoX": Row(TP, {}, NEOX),
        "tp, vision transformer": Row(TP, AGAIN | ADAMW | CLIPPED, VISION),
        "tp, a plan from a set": Row(TP, {}, GPT, faults.with_plan(faults.order_of_a_set)),
        "tp, untied by mistake": Row(
            *(TP, {}, GPT, faults.untied_layers),
            "tied weights are not tied any more: head.weight",
        ),
        "tp, norms not summed": Row(
            TP, {}, QWEN3, faults.with_plan(faults.norms_not_summed), ONE_GRADIENT
        ),
        "pp, tied": Row(PP, {}, GPT),
        "pp, untied, gpipe": Row(PP | GPIPE, SGD, UNTIED),
        "pp, untied, interleaved": Row(PP | INTERLEAVED | {"micro_batches": 8}, {}, UNTIED | DEEP),
        "pp, zero bubble": Row(PP | ZERO_BUBBLE, {}, DEEP),
        "pp, again": Row(PP, AGAIN, GPT),
        "pp, bf16": Row(PP, BF16, GPT),
        "pp, learned positions, uneven": Row(PP, {}, LEARNED | UNEVEN),
        "pp, documents": Row(PP, {}, DOCUMENTS),
        "pp, GPT-2": Row(PP, AGAIN, GPT2),
        "pp, untied Llama": Row(
            PP, {}, hugging_face("llama", num_hidden_layers=3, **GROUPED_QUERIES)
        ),
        "pp, GPT-NeoX, documents": Row(PP, {}, NEOX_WITHOUT_DROPOUT | DOCUMENTS),
        "pp, vision transformer": Row(PP, ADAMW | CLIPPED, VISION),
        "pp, tied weights not summed": Row(PP, {}, GPT, faults.untied_stages, ONE_GRADIENT),
        "pp, clipped by stage": Row(
            *(PP, SGD, UNTIED, faults.clipped_by_stage),
            "gradients are clipped by the norms of parts of the model, not by the norm of all",
        ),
    },
    4: {
        "fsdp-hybrid": Row(HYBRID, CLIPPED),
        "fsdp-hybrid, bf16": Row(HYBRID, BF16),
        "fsdp-hybrid, reduced in each pass": Row(HYBRID | EACH_PASS, ACCUMULATED | CLIPPED),
        "fsdp-hybrid, bf16 weights": Row(HYBRID, BF16_WEIGHTS),
        "fsdp-tp, bf16 weights": Row(FSDP_TP, BF16_WEIGHTS, GPT),
        "ulysses, bf16 weights": Row(ULYSSES, BF16_WEIGHTS, GPT),
        "fsdp-ulysses, bf16 weights": Row(SHARDED_ULYSSES, BF16_WEIGHTS, GPT),
        "fsdp-hybrid, fp16": Row(HYBRID, FP16 | CLIPPED, LOUD),
        **{f"ps-sync, {label}": Row(PS_SYNC, RECIPES[label]) for label in RECIPES},
        **{
            f"ps-sync, two servers, small buckets, {label}": Row(
                TWO_SERVERS | SMALL_BUCKETS, RECIPES[label]
            )
            for label in RECIPES
        },
        "ps-sync, uneven weights and groups": Row(TWO_SERVERS, ACCUMULATED, GROUPED),
        "ps-sync, weights of the loss, messages in bf16": Row(
            TWO_SERVERS | {"wire": "bf16"}, ACCUMULATED, PADDED
        ),
        "ps-sync, GPT": Row(TWO_SERVERS, ACCUMULATED, DROPOUT | UNEVEN),
        "ps-sync, messages in bf16": Row(PS_SYNC | {"wire": "bf16"}, CLIPPED),
        "ps-sync, messages in fp32": Row(
            *(PS_SYNC | {"wire": "bf16"}, {}, WORKLOAD, faults.messages_in_fp32),
            "it computes as one device does, although its definition is: gradients and parameters"
            " travel in bf16",
        ),
        # No other worker makes a gradient stale.
        "ps-async, one worker": Row({"name": "ps-async", "ranks": 1, "servers": 3}),
        "fsdp-tp, tied": Row(FSDP_TP, AGAIN, GPT),
        "fsdp-tp, untied, sequence, loss": Row(FSDP_TP | BY_POSITION, {}, UNTIED),
        "fsdp-tp, Qwen3": Row(FSDP_TP, {}, QWEN3),
        "ddp-pp, tied": Row(DDP_PP, AGAIN, GPT),
        "ddp-pp, weights of the loss": Row(DDP_PP, AGAIN, PADDED_SEQUENCES),
        "ddp-pp, interleaved": Row(DDP_PP | INTERLEAVED, SGD, UNTIED | DEEP),
        "fsdp-pp, tied": Row(FSDP_PP, AGAIN, GPT),
        "fsdp-pp, zero bubble": Row(FSDP_PP | ZERO_BUBBLE, {}, DEEP),
        "fsdp-pp, gpipe": Row(FSDP_PP | GPIPE, SGD, UNTIED),
        "fsdp-pp, vision transformer": Row(FSDP_PP, ADAMW | CLIPPED, VISION),
        "fsdp-pp, tied Qwen3": Row(FSDP_PP, {}, TIED_QWEN3),
        "tp-pp, tied": Row(TP_PP, AGAIN, GPT),
        "tp-pp, sequence, loss": Row(TP_PP | BY_POSITION, SGD, UNTIED),
        "tp-pp, zero bubble": Row(TP_PP | ZERO_BUBBLE, {}, DEEP),
        "tp-pp, vision transformer": Row(TP_PP, ADAMW | CLIPPED, VISION),
        "tp-pp, tied Qwen3": Row(TP_PP, AGAIN, TIED_QWEN3),
        "ddp-tp": Row(DDP_TP, {}, GPT),
        "ulysses, tied": Row(ULYSSES, AGAIN, GPT),
        "ulysses, untied, uneven": Row(DDP_ULYSSES, SGD, LEARNED | UNEVEN | UNTIED),
        "ulysses, documents": Row(DDP_ULYSSES, {}, LEARNED | DOCUMENTS),
        "ulysses, bf16": Row(ULYSSES, BF16, GPT),
        "ulysses, Qwen3": Row(DDP_ULYSSES, AGAIN, QWEN3),
        "ulysses, BERT, uneven": Row(DDP_ULYSSES, {}, BERT | UNEVEN),
        "ulysses, own task": Row(ULYSSES, {}, SHARED_SEQUENCES),
        "ulysses, weights of the loss": Row(DDP_ULYSSES, AGAIN, PADDED_SEQUENCES),
        "fsdp-ulysses, fp16": Row(FSDP_ULYSSES, FP16, GPT),
        "fsdp-ulysses, tied": Row(SHARDED_ULYSSES, AGAIN, GPT),
        "fsdp-ulysses, bf16": Row(SHARDED_ULYSSES, BF16, GPT),
        "ulysses, chunked loss": Row(ULYSSES, {}, CHUNKED),
        "ulysses, LoRA": Row(ULYSSES, {}, LORA),
        "ps-sync, LoRA": Row(TWO_SERVERS, {}, LORA),
        "ulysses, gradients not summed": Row(
            *(ULYSSES, {}, GPT, faults.gradients_not_summed),
            "gradients are wrong although losses are right",
        ),
        "ulysses, positions from zero": Row(
            *(ULYSSES, {}, LEARNED, faults.positions_from_zero),
            "the model computes something else from the same samples",
        ),
    },
    8: {"fsdp-tp-pp": Row({"name": "fsdp-tp-pp"}, AGAIN, GPT)},
}
"""DeepSpeed keeps what autocast computes in for all later engines of a process: its rows begin."""

UNCLIPPED = {"gradient_clipping": None}
REPEATED = UNCLIPPED | AGAIN
PROBES: dict[Group, dict[str, Row]] = {
    2: {
        **{
            f"{name}, bf16": Row({"name": name}, BF16, WIDE)
            for name in ("fsdp", "zero-1", "zero-3")
        },
        **{name: Row({"name": name}, {}, WIDE) for name in SHIPPED},
        **{
            f"{name}, bf16 weights": Row({"name": name}, BF16_WEIGHTS, WIDE)
            for name in WITH_BF16_WEIGHTS
        },
        **{
            f"{name}, reduced in each pass": Row({"name": name} | EACH_PASS, ACCUMULATED, WIDE)
            for name in ("fsdp", "fsdp-grad-op", "fsdp1")
        },
        "ddp, compress bf16": Row(DDP | IN_BF16, {}, WIDE),
        "ddp, compress fp16": Row(DDP | {"compress": "fp16"}, {}, WIDE),
        "ddp, powersgd": Row(DDP | POWERSGD | {"powersgd_rank": 2, "bucket_mb": 0.5}, {}, WIDE),
        "local-sgd": Row(LOCAL_SGD | {"period_steps": 4}, {}, WIDE),
        "diloco": Row(DILOCO | {"period_steps": 4, "fragments": 3}, {}, WIDE),
        "diloco, bf16 weights": Row(DILOCO | {"period_steps": 4}, BF16_WEIGHTS, WIDE),
        "ddp, language": Row(DDP, UNCLIPPED, LARGE_GPT | UNTIED),
        "tp, again": Row(TP, REPEATED, LARGE_GPT),
        "tp, sequence": Row(TP | {"sequence_parallel": True}, REPEATED, LARGE_GPT),
        "tp, bf16, loss": Row(TP | {"loss_parallel": True}, UNCLIPPED | BF16, LARGE_GPT),
        "tp, bf16 weights": Row(TP, REPEATED | BF16_WEIGHTS, LARGE_GPT),
        "tp, bf16 weights, sequence": Row(TP | BY_POSITION, REPEATED | BF16_WEIGHTS, LARGE_GPT),
        "pp, tied": Row(PP, UNCLIPPED, LARGE_GPT),
        "pp, untied": Row(PP, REPEATED, LARGE_GPT | UNTIED),
        "pp, zero bubble": Row(PP | ZERO_BUBBLE, UNCLIPPED, LARGE_GPT | DEEP),
    },
    VARIANTS[4]: {
        "ddp": Row(DDP, {}, WIDE),
        "fsdp-hybrid": Row(HYBRID, {}, WIDE),
        "fsdp-hybrid, reduced in each pass": Row(HYBRID | EACH_PASS, ACCUMULATED, WIDE),
        "ddp, language": Row(DDP, UNCLIPPED, LARGE_GPT),
        "fsdp-tp": Row(FSDP_TP, REPEATED, LARGE_GPT),
        "ddp-pp": Row(DDP_PP, REPEATED, LARGE_GPT),
        "fsdp-pp": Row(FSDP_PP, REPEATED, LARGE_GPT),
        "fsdp-tp-pp": Row(TP_PP, REPEATED, LARGE_GPT),
        "ulysses": Row(ULYSSES, UNCLIPPED, LARGE_GPT),
        "ulysses, again": Row(ULYSSES, REPEATED, LARGE_GPT),
        "ulysses, bf16": Row(DDP_ULYSSES, UNCLIPPED | BF16, LARGE_GPT),
        "ulysses, Qwen3": Row(DDP_ULYSSES, UNCLIPPED | BF16, LARGE | QWEN3),
        "fsdp-ulysses": Row(SHARDED_ULYSSES, UNCLIPPED, LARGE_GPT),
    },
}
"""Models large enough that state and traffic are more than rounding; nothing is clipped."""
UNCOUNTED = ("zero-1", "zero-2", "zero-3")
"""On the CPU DeepSpeed reduces whole gradients, or gathers once; the cost model is of a GPU."""

Fractions = tuple[float | None, float | None, float | None]
HELD: dict[Group, dict[str, Fractions]] = {
    2: {
        "zro": (1, 1, 0.5),
        "fsdp": (0.5, 0.5, 0.5),
        "fsdp, bf16": (0.5, 0.5, 0.5),
        "fsdp-grad-op": (1.5, 0.5, 0.5),  # the gathered parameters and a shard
        "fsdp1": (0.5, 0.5, 0.5),
        "fsdp, reduced in each pass": (0.5, 0.5, 0.5),
        "fsdp1, reduced in each pass": (0.5, 0.5, 0.5),
        "zero-0": (1, 1, 1),
        # The stages hold half of the momentum and of an fp32 copy; stage 3 gathers small layers
        # early, and its gradients are in a buffer of a fixed size.
        "zero-1": (1, 0.745, 1),
        "zero-1, bf16": (0.5, 0.372, 1),
        "zero-2": (1, 0.745, 1),
        "zero-3": (1.5, None, 1),
        "zero-3, bf16": (0.75, None, 1),
        "ddp, compress bf16": (1, 1, 1),
        "ddp, powersgd": (1, 2.02, 1),  # an error of each element, and thin factors
        "local-sgd": (1, 1, 1),
        "diloco": (2, 1, 2),
        "tp, again": (0.44, 0.44, 0.44),
        "tp, sequence": (0.44, 0.44, 0.44),
        "tp, bf16, loss": (0.44, 0.44, 0.44),
        "tp, bf16 weights": (0.22, 0.22, 0.22),
        "ddp, bf16 weights": (0.5, 0.5, 0.5),
        "fsdp-grad-op, bf16 weights": (0.75, 0.25, 0.25),
        # DeepSpeed copies the part that a rank updates, in bf16 as well.
        "zero-1, bf16 weights": (0.5, 0.372, 0.5),
        "zero-2, bf16 weights": (0.5, 0.372, 0.5),
        "zero-3, bf16 weights": (0.75, None, 0.5),
        "diloco, bf16 weights": (1, 0.5, 1),
        "pp, untied": (0.5, 0.5, 0.5),
    },
    VARIANTS[4]: {
        "fsdp-hybrid": (0.5, 0.5, 0.5),
        "fsdp-hybrid, reduced in each pass": (0.5, 0.5, 0.5),
        "fsdp-tp": (0.25, 0.25, 0.25),
        "fsdp-tp-pp": (0.287, 0.287, 0.287),
        "ulysses": (1, 1, 1),
        "ulysses, again": (1, 1, 1),
        "fsdp-ulysses": (0.25, 0.25, 0.25),
    },
}
"""Largest fraction of `ddp`'s parameters, gradients and optimizer state that a rank holds."""

REFUSED: dict[Group, dict[str, tuple[Row, tuple[str, ...]]]] = {
    2: {
        "ddp, unused": (
            Row(DDP, {}, picture_model("PartlyUsed")),
            ("never.weight", "find_unused_parameters: true"),
        ),
        **{
            f"{name}, scalar": (
                Row({"name": name}, {}, picture_model("scaled")),
                ("such as scale; give scale the shape (1,)",),
            )
            for name in ("fsdp", "fsdp-grad-op", "fsdp1", "zero-1", "zero-3")
        },
        **{
            f"{name}, unequal calls": (
                Row({"name": name}, {}, picture_model("Routed")),
                ("rank 0 calls experts.0", "rank 1 calls experts.1", "multiplied by zero"),
            )
            for name in ("fsdp", "fsdp-grad-op", "fsdp1", "zero-1", "zero-3")
        },
        **{
            f"{name}, averaged": (Row({"name": name}, options, AVERAGED), ("after_step", fact))
            for name, options, fact in (
                ("fsdp1", {}, "may lie on other ranks"),
                ("zero-3", {}, "no parameters between passes"),
                ("zero-1", BF16, "mixed_precision: autocast"),
                ("local-sgd", {}, "different weights between rounds"),
            )
        },
        "tp, heads": (
            Row(TP, {}, {"heads": 1}),
            ("1 heads cannot be divided over 2 tensor ranks",),
        ),
        "tp, dropout": (Row(TP, {}, {"dropout": 0.1}), ("set workload.dropout: 0",)),
        "tp, positions": (
            Row(TP | {"sequence_parallel": True}, {}, LEARNED),
            ("sequence_parallel: false",),
        ),
        "tp, length": (
            Row(TP | {"sequence_parallel": True}, {}, {"sequence_length": 25}),
            ("sequences of 25 cannot be divided",),
        ),
        "pp, chunked loss": (Row(PP, {}, CHUNKED), ("set workload.loss_chunks: 1",)),
        "tp, chunked loss": (Row(TP, {}, CHUNKED), ("set workload.loss_chunks: 1",)),
        "tp, LoRA": (Row(TP, {}, LORA), ("no matrices of an adapter", "use fsdp")),
        "fsdp1, LoRA, bf16": (
            Row({"name": "fsdp1"}, BF16, LORA_OF_BF16),
            ("load the frozen parameters in float32",),
        ),
        "tp, no plan": (Row(TP, {}, hugging_face("gpt2")), ("fsdp",)),
        "pp, batch norm": (Row(PP), ("batch norm",)),
        "pp, dropout": (Row(PP, {}, {"dropout": 0.1}), ("a dropout",)),
        "pp, few layers": (
            Row(PP | INTERLEAVED, {}, {"layers": 1}),
            ("do not make 4 stages",),
        ),
        "pp, dropouts of GPT-2": (
            Row(PP, {}, hugging_face("gpt2", embd_pdrop=0)),
            ("set resid_pdrop, attn_pdrop",),
        ),
    },
    4: {
        "ulysses, heads": (
            Row(ULYSSES, {}, {"heads": 2}),
            ("2 heads cannot be divided over 4 ranks; use 2 ranks of sequence",),
        ),
        "ulysses, length": (
            Row(ULYSSES, {}, {"sequence_length": 25}),
            ("25 positions cannot be divided",),
        ),
        "ulysses, dropout": (
            Row(ULYSSES, {}, {"dropout": 0.1}),
            ("dropout, a dropout, would draw other masks",),
        ),
        "ulysses, no plan": (
            Row(ULYSSES, {}, OwnOptions(task="tests.distributed.models:GroupedTokens")),
            ("sequence_plan(model)",),
        ),
    },
}
"""Rows that a strategy refuses, and facts that the message has."""

EVERY_STRATEGY = {
    *("fsdp, GPT, bf16", "fsdp-grad-op, GPT, bf16", "zero-1, GPT, bf16", "zero-2, GPT, bf16"),
    *("zero-3, GPT, bf16", "ddp, GPT, bf16", "zro, GPT-2", "zero-0, GPT-2", "fsdp1, Llama"),
    *(
        "fsdp, LoRA",
        "fsdp, reduced in each pass",
        "ddp, powersgd",
        "ddp, no powersgd",
        "local-sgd, sgd",
        "diloco, adamw, clipped",
    ),
    *("diloco, first round discarded", "tp, tied", "tp, untied by mistake", "pp, tied"),
    *("pp, tied weights not summed", "fsdp-hybrid", "fsdp-tp, tied", "ulysses, tied"),
    *("fsdp-ulysses, tied", "ps-sync, GPT", "ps-async, one worker", "ddp-pp, tied"),
    *("fsdp-pp, tied", "tp-pp, tied", "ulysses, heads", "ulysses, length", "ulysses, dropout"),
    *SHIPPED,
    *("local-sgd", "diloco", "ddp, language", "tp, again", "pp, untied"),
    *("ddp, unused", "fsdp, scalar", "zero-3, unequal calls", "fsdp1, averaged", "tp, heads"),
    *("tp, dropout", "tp, LoRA", "pp, chunked loss", "pp, batch norm", "pp, few layers"),
}
"""Rows of 2 and 4 ranks in the default run: each strategy, and faults and refusals of each kind."""


COMPARED = {"ddp", "ddp, language", *WITH_BF16_WEIGHTS}
"""Probes of 2 ranks that probes of variants are compared with: both runs have them."""


def divide(table: dict[Group, Any]) -> None:
    """Move the rows that the default run leaves out to groups of their own."""
    for group in VARIANTS.keys() & table.keys():
        rows = table[group]
        table[group] = {name: row for name, row in rows.items() if name in EVERY_STRATEGY}
        table[VARIANTS[group]] = {
            name: row
            for name, row in rows.items()
            if name not in EVERY_STRATEGY or (table is PROBES and name in COMPARED)
        }


for each in (ROWS, PROBES, HELD, REFUSED):
    divide(each)


@dataclass(frozen=True, slots=True, kw_only=True)
class Probed:
    record: ProbeRecord
    collectives: dict[str, CollectiveRecord]
    """Counted over two rounds of steps."""
    steps: int
    """Steps of these rounds."""
    needed: RequiredTraffic
    draws_moved: bool
    saved_bytes: int
    """Bytes saved for the backward pass; 0 with tensor or pipeline parallelism."""

    @property
    def held(self) -> tuple[int, int, int]:
        of = self.record
        state = of.parameter_bytes, of.gradient_bytes, of.optimizer_state_bytes
        assert None not in state
        return state  # type: ignore[return-value]


def probed(process: RankContext, of: Trial) -> Probed:
    """Count collectives over two rounds after a warm-up, then probe."""
    workload = build_workload(of.workload, seed=3)
    worker = of.built_strategy.start(workload, of.recipe, process)
    assert not isinstance(worker, Server)
    share = of.layout.ranks[process.rank].share
    assert share is not None
    batches = workload.batches(BatchPlan(global_batch=of.batch_per_step, seed=3), share)
    before = torch.get_rng_state()
    for _ in range(3):
        worker.step(next(batches), NoSpans())
    moved = not torch.equal(before, torch.get_rng_state())
    steps = 2 * worker.round_steps()
    with CollectiveCounter() as counter:
        for _ in range(steps):
            worker.step(next(batches), NoSpans())
    saved: list[int] = []

    def take_step(spans: Spans) -> None:
        seen = set[int]()
        storage_bytes(worker.held_state().parameters, seen=seen)

        def pack(tensor: Tensor) -> Tensor:
            if of.layout.tensor == of.layout.pipeline == 1:  # a DTensor has no storage
                saved.append(storage_bytes([tensor], seen=seen))
            return tensor

        if isinstance(spans, HeldSpans):
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                worker.step(next(batches), spans)
        else:
            worker.step(next(batches), spans)

    record = probe(worker, take_step, process.device)
    needed = cost_model(of.built_strategy).required_traffic(counted_cell(of, workload, worker))
    return Probed(
        record=record,
        collectives=counter.probe_fields()["collectives"],
        steps=steps,
        needed=needed,
        draws_moved=moved,
        saved_bytes=sum(saved),
    )


def counted_cell(of: Trial, workload: Workload, worker: Worker) -> Cell:
    """The trial for its cost model, with the sizes that a run stores."""
    counts: Any = model_counts(
        workload,
        workload.build_model(),
        of.recipe,
        tensor_ranks=of.layout.tensor,
        sequence_ranks=of.layout.sequence,
    )
    between = dict(worker.between_stages())
    known = {name: counts.get(name) for name in ModelSize.__dataclass_fields__}
    model = workload.build_model()
    units = 1 + len(sharding_units(model, "blocks", workload.blocks(model)))
    sizes = {name: of for name, of in known.items() if of is not None}
    size = ModelSize(**sizes | between | {"units": units})
    return Cell(size=size, recipe=of.recipe, world_size=of.world_size)
