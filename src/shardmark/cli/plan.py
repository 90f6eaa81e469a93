"""`shardmark plan`: predicts memory, time and cost on other machines."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from shardmark.base.errors import InputError
from shardmark.base.files.storage import storing
from shardmark.base.text import say, say_text, terminal_width
from shardmark.cli.arguments import Overrides, path_of
from shardmark.cli.phases import PhaseLines

if TYPE_CHECKING:
    from shardmark.predict.request import PlanRequest

AMOUNT = re.compile(
    r"((?:[1-9]\d*(?:[,_]\d{3})+|\d+)(?:\.\d+)?(?:e\+?\d+)?)\s*(?:([kmbt])(?:n|r?illion)?)?",
    re.IGNORECASE,
)
FACTORS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}


def plan(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A model (resnet50, timm:NAME, hf:NAME, hf:FILE.json, a folder of save_pretrained,"
            " module:function, a task's module:Class), or an experiment: a YAML file or a preset.",
        ),
    ],
    machines: Annotated[
        list[str] | None,
        typer.Argument(metavar="[MACHINE]", help="More machines, after --compare."),
    ] = None,
    *,
    on: Annotated[
        list[str] | None,
        typer.Option(
            "--on",
            metavar="MACHINE",
            help="8xh100 or h100x8, 2x8xh100 for two nodes, a node type such as dgx-h100, or a YAML"
            " file.  Repeat it to compare machines.",
        ),
    ] = None,
    compare: Annotated[
        list[str] | None,
        typer.Option(
            "--compare",
            metavar="MACHINE...",
            help="Compare these machines, the cheapest first, by the best strategy of each.",
        ),
    ] = None,
    batch: Annotated[
        int | None, typer.Option(metavar="SAMPLES", min=1, help="Samples of a GPU in a step.")
    ] = None,
    sequence_length: Annotated[
        int | None, typer.Option(metavar="TOKENS", min=2, help="Tokens of a sample.")
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option(
            metavar="PRECISION",
            help="bf16, fp16, fp32, or fp8 for products in 8 bits inside blocks and bf16 elsewhere;"
            " for a model, by default the first of bf16, fp16 and fp32 that the card has.",
        ),
    ] = None,
    adapter: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Train an adapter beside frozen weights: lora, or qlora with weights in 4 bits.",
        ),
    ] = None,
    reference_model: Annotated[
        bool,
        typer.Option(
            "--reference-model",
            help="Count a frozen copy of the model in memory, as DPO needs one without an adapter.",
        ),
    ] = False,
    tokens: Annotated[
        str | None,
        typer.Option(
            metavar="NUMBER",
            help="Tokens to price: 10B, 300M, 2T.  Without it: 1B tokens, or 1M samples.",
        ),
    ] = None,
    samples: Annotated[
        str | None,
        typer.Option(metavar="NUMBER", help="Samples to price; of a language model, sequences."),
    ] = None,
    epochs: Annotated[
        int | None,
        typer.Option(metavar="NUMBER", min=1, help="Passes over --samples or --tokens."),
    ] = None,
    padding: Annotated[
        float | None,
        typer.Option(
            metavar="FRACTION",
            help="Fraction of a sample's tokens that are padding, 0.4 for example: speed, hours and"
            " dollars are then those of the other tokens.  Packed samples have none.",
        ),
    ] = None,
    mean_length: Annotated[
        float | None,
        typer.Option(metavar="TOKENS", help="The same by the mean length without padding."),
    ] = None,
    nodes: Annotated[
        str,
        typer.Option(
            metavar="COUNTS", help="Numbers of nodes: 4, or 1,2,3, or 1..128, which doubles."
        ),
    ] = "1",
    stack: Annotated[
        Literal["eager", "fused"] | None,
        typer.Option(
            help="Vintage of the software: eager, of 2018 to 2023, stores the scores of attention;"
            " fused, the default for language models, has FlashAttention and fused kernels."
        ),
    ] = None,
    run: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="RUN",
            parser=path_of,
            help="Calibrate the prediction by a stored run of this model, of another one, or of"
            " your script with `shardmark time`; the interval is narrower.",
        ),
    ] = None,
    measured: Annotated[
        str | None,
        typer.Option(
            metavar="SPEED",
            help="The same by a number: '3,100 tokens/s on 1xa100-80', '0.42 s/step', '2.1 it/s on"
            " 8xh100 with fsdp'.",
        ),
    ] = None,
    measured_batch: Annotated[
        int | None,
        typer.Option(
            metavar="SAMPLES", min=1, help="Samples of a GPU in a measured step, if not --batch."
        ),
    ] = None,
    measured_model: Annotated[
        str | None, typer.Option(metavar="MODEL", help="The measured model, if it is another one.")
    ] = None,
    price_per_hour: Annotated[
        list[float] | None,
        typer.Option(
            "--price",
            "--price-per-hour",
            metavar="DOLLARS",
            min=0,
            help="Price of one card for an hour; adds the cost.  With several machines, one price"
            " for all, or `--price` once for each, in their order.",
        ),
    ] = None,
    search: Annotated[
        bool,
        typer.Option(
            "--search",
            help="Compare all layouts of the largest number of ranks: replicas, shards, tensor"
            " ranks, stages, micro-batches, activation checkpointing, CPU offload.",
        ),
    ] = False,
    write: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            parser=path_of,
            help="Search, and write the fastest layout that fits as an experiment for `run`.",
        ),
    ] = None,
    memory: Annotated[
        bool, typer.Option("--memory", help="Show the parts of the memory as well.")
    ] = False,
    speed: Annotated[
        bool, typer.Option("--speed", help="Show the step time and its comparisons as well.")
    ] = False,
    view: Annotated[
        Literal["when"] | None,
        typer.Option(
            help="Show instead which strategy is best in which range of each axis: the size of the"
            " model, the ranks, the batch.",
        ),
    ] = None,
    overrides: Overrides = None,
    form: Annotated[
        Literal["text", "markdown", "json"],
        typer.Option("--format", help="json has every value, in base units."),
    ] = "text",
) -> None:
    """Predict memory, speed and cost of every strategy on machines that you do not have.

    Exit code 0 if something fits, 1 if nothing does or nothing could be predicted.
    """
    options = locals()
    from shardmark.base.table.formats import Format
    from shardmark.experiment.load import to_yaml
    from shardmark.predict.models import Models
    from shardmark.predict.plan import make_plan
    from shardmark.predict.table import render_plan

    if write is not None and not write.parent.is_dir():
        raise InputError(f"--write {write}", "its folder does not exist", "create it first")
    if write is not None and write.exists():
        raise InputError(f"--write {write}", "it exists already", "name another file")
    phases = PhaseLines()
    phases("reading the question, and loading torch")
    request = request_of(options)
    models = Models()
    models.notify = phases
    predicted = make_plan(request, models)
    text = render_plan(
        predicted,
        Format(form),
        terminal_width() or 80,
        memory=memory,
        speed=speed,
        best_of_each=bool(compare),
        when=view is not None,
    )
    say_text(text)
    if write is not None:
        if predicted.winner is None:
            raise InputError(f"--write {write}", "no layout fits", "use more nodes or other cards")
        with storing(write):
            write.write_text(to_yaml(predicted.winner), encoding="utf-8")
        say(f"written: {write}   measure it: shardmark run {write}", error=form == "json")
    if not predicted.answered:
        raise typer.Exit(1)


def request_of(options: Mapping[str, Any]) -> PlanRequest:
    """Return the question that the options of the command ask.  Raises `InputError`."""
    from shardmark.base.results.store import load_run
    from shardmark.predict.plan import parse_nodes
    from shardmark.predict.request import PlanRequest

    words = [word for name in ("on", "compare", "machines") for word in options[name] or ()]
    kinds = [part.strip() for word in words for part in word.split(",") if part.strip()]
    if not kinds:
        raise InputError("--on", "no machine is given", "name one, such as --on 8xh100")
    if options["machines"] and not options["compare"]:
        allowed = "allowed are MODEL --on MACHINE"
        raise InputError(options["machines"][0], "one argument too many", allowed)
    tokens, samples, run = options["tokens"], options["samples"], options["run"]
    if tokens is not None and samples is not None:
        raise InputError("--tokens and --samples", "both are given", "give one of them")
    measured = ("measured_batch", "measured_model")
    if options["measured"] is None and any(options[name] is not None for name in measured):
        raise InputError("--measured", "it is not given", "give it with the speed and machine")
    work, epochs = samples if tokens is None else tokens, options["epochs"]
    if epochs is not None and work is None:
        raise InputError("--epochs", "of how many samples is not said", "give --samples as well")
    precision, overrides = options["precision"], [*(options["overrides"] or ())]
    if precision is not None and (precision := precision.lower()) == "tf32":
        precision, overrides = "fp32", ["recipe.tf32=true", *overrides]
    for name in (options["model"], *kinds):
        path_of(name)  # refuses the home folder of an unknown user
    as_given = ("batch", "sequence_length", "adapter", "reference_model", "stack", "padding")
    return PlanRequest(
        subject=options["model"],
        machines=tuple(kinds),
        nodes=parse_nodes(options["nodes"]),
        overrides=tuple(overrides),
        precision=precision,
        run=None if run is None else load_run(run),
        prices_per_hour=tuple(options["price_per_hour"] or ()),
        search=options["search"] or options["write"] is not None,
        work=None if work is None else parse_amount(work) * (epochs or 1),
        work_unit="samples" if tokens is None else "tokens",
        **{name: options[name] for name in (*as_given, "mean_length", "measured", *measured)},
    )


def parse_amount(text: str) -> float:
    """Parse a number of tokens or samples such as `10B`, `156,000` or `1e9`.

    Raises `InputError` for other text.
    """
    match = AMOUNT.fullmatch(text.strip())
    number, letter = match.groups("") if match else ("0", "")
    amount = float(re.sub("[,_]", "", number)) * FACTORS[letter.lower()]
    if not 0 < amount < inf:
        allowed = "allowed is a number such as 10B, 300M or 1e9"
        raise InputError("--tokens or --samples", f"found {text!r}", allowed)
    return amount
