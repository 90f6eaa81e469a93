"""`shardmark plan` and `shardmark.plan` on a model that is made up."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import shardmark
from shardmark.base.errors import InputError
from shardmark.cli import main
from shardmark.cli.plan import parse_amount
from shardmark.predict.profile import Profile
from tests.unit.predict.made import MadeModels, made_profile

EXPERIMENT = """
name: made
workload: {name: language, model: gpt, dataset: stdlib, tokenizer: bytes, sequence_length: 128}
recipe: {per_rank_batch: 64, steps: 1000, precision: bf16}
matrix: {strategy: [single, ddp, fsdp, {name: fsdp-hybrid, shard_group: 3}]}
"""


Printed = Callable[..., str]


@pytest.fixture(autouse=True)
def _made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardmark.predict.models.Models", MadeModels)


def made_models(monkeypatch: pytest.MonkeyPatch, *, million_parameters: float) -> None:
    made = made_profile(units=64, million_parameters=million_parameters)
    monkeypatch.setattr("shardmark.predict.models.Models", lambda: MadeModels(made))


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "made.yaml"
    path.write_text(EXPERIMENT)
    return str(path)


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]) -> Printed:
    """Returns what `plan` prints; with the exit code of a mistake, its message."""

    def plan(*arguments: str, code: int = 0) -> str:
        assert main(["plan", *arguments]) == code
        return capsys.readouterr()[code == 2]

    return plan


def test_the_answers_come_first_within_80_columns(printed: Printed, file: str) -> None:
    text = printed(file, "--on", "h100x8", "--nodes", "1..16", "--price-per-hour", "2.5")
    assert max(map(len, text.splitlines())) <= 80
    assert text.startswith("Fastest: ddp on 128 ranks of 16 nodes")
    answers, _, tables = text.partition("made (250 M parameters) on h100x8, bf16")
    assert "dollars" in answers
    assert "tokens/s (range)" in tables
    assert "90 % interval without a measurement" in " ".join(tables.split())
    assert "Not predicted: fsdp-hybrid" in " ".join(tables.split())
    text = printed(file, "--on", "h100x8", "--format", "markdown")
    assert "### made (250 M parameters) on h100x8, bf16" in text
    assert "| ddp | 8 | yes |" in text


def test_without_a_network_no_speed_is_said(printed: Printed) -> None:
    passes = ("--batch", "4", "--set", "recipe.gradient_accumulation=4")
    text = " ".join(printed("qwen3-8b", "--on", "2x4xa10", *passes, code=1).split())
    assert "No speed could be predicted: --on: the network between nodes is not described" in text
    assert "GiB if each reduces its gradients" in text
    for of_speed in ("tokens/s", "hours", "interval"):
        assert of_speed not in text


def test_json_has_every_row_in_base_units(printed: Printed, file: str) -> None:
    document = json.loads(printed(file, "--on", "dgx-h100", "--nodes", "1,2", "--format", "json"))
    assert [answer["question"] for answer in document["answers"]] == ["fastest", "memory", "cost"]
    rows = {(row["strategy"], row["ranks"]): row for row in document["rows"]}
    ddp = rows["ddp", 16]
    rate = ddp["tokens_per_second"]
    assert rate["low"] < rate["value"] < rate["high"]
    assert rate["value"] == pytest.approx(16 * 64 * 128 / ddp["step_seconds"]["value"])
    assert sum(ddp["seconds_by_part"].values()) == pytest.approx(ddp["step_seconds"]["value"])
    refused = rows["fsdp-hybrid", 8]
    assert "3" in refused["reason"]
    assert refused["step_seconds"] is None


def test_plan_does_not_overwrite_files(printed: Printed, file: str, tmp_path: Path) -> None:
    assert "it exists already; name another file" in printed(
        file, "--on", "h100x8", "--write", file, code=2
    )
    assert Path(file).read_text() == EXPERIMENT
    printed(file, "--on", "h100x8", "--write", str(tmp_path / "best.yaml"))
    assert "strategy:" in (tmp_path / "best.yaml").read_text()


def test_plan_reports_a_card_without_the_precision(printed: Printed, file: str) -> None:
    text = printed(file, "--on", "t4x8", "--set", "precision=bf16",
                   "--set", "matrix.strategy=[ddp, ddp]", code=1)  # fmt: skip
    assert text.startswith("No speed could be predicted: recipe.precision: 'Tesla T4' has no bf16")
    assert text.count("'Tesla T4' has no bf16") == 1
    several = printed(file, "--on", "t4x8", "--set", "precision=bf16", code=1)
    assert several.startswith("No speed could be predicted; each reason is below.")


def test_python_function_plans_nodes_and_steps(file: str) -> None:
    plan = shardmark.plan(file, "h100x8", nodes=[1, 2], price_per_hour=2.0, steps=500)
    assert [row.ranks for row in plan.rows if row.strategy == "ddp"] == [8, 16]
    assert {row.steps for row in plan.rows} == {500}
    assert plan.best[0].question == "fastest"
    with pytest.raises(InputError, match="--nodes"):
        shardmark.plan(file, "h100x8", nodes=0)


def test_plan_without_a_fitting_strategy_exits_with_code_1(printed: Printed, file: str) -> None:
    text = printed(file, "--on", "t4x1", "--set", "per_rank_batch=4096",
                   "--set", "precision=fp16", code=1)  # fmt: skip
    assert text.startswith("Nothing fits")


def test_several_machines_are_compared(printed: Printed, file: str) -> None:
    machines = ("--on", "h100x8", "--on", "a100-80x8")
    prices = ("--price-per-hour", "4", "--price-per-hour", "1")
    text = printed(file, *machines, *prices)
    answers, _, table = text.partition("on h100x8 and a100-80x8")
    cheapest, _, fastest = " ".join(answers.split()).partition("Fastest:")
    assert "of a100-80x8" in cheapest, "a quarter of the price for a third of the speed"
    assert "of h100x8" in fastest
    rows = [line.split()[0:3:2] for line in table.splitlines() if "a100-80x8" in line]
    assert {"ddp", "fsdp"} < {name for name, _ in rows}
    document = json.loads(printed(file, *machines, "--format", "json"))
    assert {row["on"] for row in document["rows"]} == {"h100x8", "a100-80x8"}
    assert "--search: found 2 kinds of machines; give one --on" in printed(
        file, *machines, "--search", code=2
    )
    assert "2 prices for 1 kinds" in printed(file, "--on", "h100x8", *prices, code=2)


def test_samples_of_a_language_model_are_sequences(printed: Printed, file: str) -> None:
    machine = ("--on", "8xh100", "--price", "2")
    of_samples = printed(file, *machine, "--samples", "1M")
    assert "for 1 M samples (128 M tokens)" in " ".join(of_samples.split())
    of_tokens = printed(file, *machine, "--tokens", "128M")
    tables = (
        text.partition("strategy")[2].partition("hours")[2] for text in (of_samples, of_tokens)
    )
    assert len({table.partition("hours")[0] for table in tables}) == 1
    assert "samples of this model have no tokens; give --samples" in printed(
        "resnet50", *machine, "--tokens", "1B", code=2
    )
    printed(file, *machine, "--tokens", "1B", "--samples", "1M", code=2)


def test_passes_over_samples_are_priced(printed: Printed) -> None:
    text = printed("gpt2", "--on", "4xa100-40", "--samples", "52k", "--epochs", "3", "--price", "2")
    words = " ".join(text.split())
    assert "for 156 k samples (160 M tokens), each card at 2 dollars an hour" in words


def test_spellings_of_a_precision(printed: Printed) -> None:
    machine = ("--on", "1xa100-40", "--precision")
    words = " ".join(printed("resnet50", *machine, "TF32").split())
    assert "on 1xa100-40, fp32" in words
    assert "products in TF32" in words
    assert "on 1xa100-40, bf16" in printed("resnet50", *machine, "BF16")
    assert "on 1xa100-40, fp32" in printed("resnet50", *machine, "fp32")


QUESTION = ("resnet50", "--on", "8xh100", "--samples", "10M", "--price", "2")


def test_a_question_about_a_model_is_answered_by_one_table(printed: Printed) -> None:
    text = printed(*QUESTION)
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) <= 30
    assert lines[0].startswith("Fastest: ")
    assert "dollars" in text.partition("\n\n")[0]
    assert "for 10 M samples" in text.partition("\n\n")[0]
    assert "Fewest: 1 GPU, with single in" in text
    header = next(line for line in lines if line.startswith("strategy"))
    assert header.split()[:4] == ["strategy", "ranks", "fits", "GiB"]
    assert {"hours", "dollars"} < set(header.split())
    rows = lines[lines.index(header) + 2 :][:9]
    assert [row.split()[1] for row in rows] == [*"888888421"], "fewer cards of the machine, too"
    assert {row.split()[2] for row in rows} == {"yes"}
    assert text.count("bf16,") + text.count(", bf16\n") == 1, "precision is said once"
    assert "Assumed: 64 images of 224 x 224 a GPU and step" in text
    assert "activations" not in text
    assert "activations" in printed(*QUESTION, "--memory")
    assert "naive" in printed(*QUESTION, "--speed")


def test_json_prices_the_work_that_was_asked_for(printed: Printed) -> None:
    rows = json.loads(printed(*QUESTION, "--format", "json"))["rows"]
    for row in rows:
        assert row["trained_samples"] == 10e6
        rate = row["samples_per_second"]["value"]
        assert row["hours"] == pytest.approx(10e6 / rate / 3600)
        assert row["dollars"] == pytest.approx(2 * row["ranks"] * row["hours"])


def test_machines_are_compared_by_their_best_strategy(printed: Printed) -> None:
    prices = ("--price", "1", "--price", "9", "--price", "1")
    machines = ("--compare", "8xa100-80,8xh100", "16xl40s")
    text = printed("resnet50", *machines, *prices)
    assert max(map(len, text.splitlines())) <= 80
    table = text.partition("machines  ")[2].splitlines()
    rows = [line for line in table if "x" in line.partition("  ")[2]]
    dollars = [float(row.split()[-1]) for row in rows[:3]]
    assert dollars == sorted(dollars), "the cheapest first"
    assert {row.split()[1] for row in rows[:3]} == {"8xa100-80", "8xh100", "16xl40s"}


def test_remedies_are_looked_for_only_where_no_machine_is_enough(
    printed: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_models(monkeypatch, million_parameters=20_000.0)
    question = ("hf:Qwen/Qwen3-32B", "--compare", "1xh100")
    text = printed(*question, "1xa100-80", code=1)
    assert "What would make it fit on 1xh100" in text, "as it was looked for"
    assert "--search" not in text, "which takes one machine"

    def refused(*_: object) -> tuple[()]:
        raise AssertionError("remedies that the answer leaves out")

    monkeypatch.setattr("shardmark.predict.plan.remedies_of", refused)
    assert "What would make it fit" not in printed(*question, "8xh200")


def test_a_machine_with_one_card_is_compared_by_a_single_device(printed: Printed) -> None:
    arguments = ("resnet50", "--compare", "1xh100", "2xh100", "--price", "2", "--format", "json")
    rows = json.loads(printed(*arguments))["rows"]
    places = {(row["on"], row["strategy"]) for row in rows}
    assert [strategy for on, strategy in places if on == "1xh100"] == ["single"]
    assert ("2xh100", "ddp") in places
    assert ("2xh100", "single") not in places


def test_a_model_that_does_not_fit_has_remedies(
    printed: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_models(monkeypatch, million_parameters=60_000.0)
    text = printed("hf:Qwen/Qwen3-32B", "--on", "8xh100", code=1)
    assert text.startswith("Nothing fits: ")
    assert "What would make it fit" in text
    remedies = text.partition("What would make it fit")[2]
    assert "CPU offload" in remedies
    assert " GPUs" in remedies
    assert "--set cpu_offload=true" in " ".join(remedies.split())
    assert max(map(len, text.splitlines())) <= 80
    assert len(text.splitlines()) <= 18
    document = json.loads(
        printed("hf:Qwen/Qwen3-32B", "--on", "8xh100", "--format", "json", code=1)
    )
    offload = {one["change"]: one for one in document["remedies"]}["CPU offload"]
    assert (offload["fit"], offload["device_bytes"] < 80 * 2**30) == ("yes", True)
    assert offload["strategy"] == "zero-3", "two bytes beside Adam's sixteen"
    assert offload["host_bytes"] == pytest.approx(18 * 60e9, rel=0.01)
    assert "takes 1,006 GiB of each node's own memory" in " ".join(text.split())
    assert document["assumed"].startswith("1 sequence of 4096 tokens a GPU")


class Adaptable(MadeModels):
    """32 billion parameters, of which an adapter freezes nearly all.  Activation checkpointing
    keeps a tenth of the activations."""

    def __init__(self, activation_bytes: float = 100e6) -> None:
        super().__init__()
        self._activation_bytes = activation_bytes

    def profile(self, options: Any, recipe: Any, **_: Any) -> Profile:
        kept = self._activation_bytes * (0.1 if recipe.activation_checkpointing else 1)
        full = made_profile(units=64, million_parameters=32_000.0, sample_bytes=kept)
        if options.adapter is None:
            return full
        frozen = replace(full.units[0], trained_parameters=1000, frozen_element_bytes=2.0)
        size = replace(full.size, trained_parameters=64_000, frozen_element_bytes=2.0)
        return replace(full, units=(frozen,) * 64, size=size)


def test_an_adapter_is_a_remedy_of_its_own(
    printed: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It trains something else, so that it is no part of all changes together."""
    monkeypatch.setattr("shardmark.predict.models.Models", Adaptable)
    arguments = ("hf:Qwen/Qwen3-32B", "--on", "2xh100", "--format", "json")
    remedies = json.loads(printed(*arguments, code=1))["remedies"]
    by_change = {one["change"]: one for one in remedies}
    lora = by_change["LoRA"]
    assert (lora["setting"], lora["fit"]) == ("--adapter lora", "yes")
    assert [one["change"] for one in remedies if "--adapter" in one["setting"]] == ["LoRA"]
    document = json.loads(printed(*arguments, "--adapter", "lora"))
    assert "LoRA of rank 8 beside bf16 weights" in document["assumed"]


def test_an_adapter_that_is_not_enough_is_joined_by_activation_checkpointing(
    printed: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardmark.predict.models.Models", lambda: Adaptable(100e9))
    arguments = ("hf:Qwen/Qwen3-32B", "--on", "2xh100", "--format", "json")
    without = ("--set", "activation_checkpointing=false")
    for chosen, change, setting in (
        ((), "LoRA", "--adapter lora"),
        (without, "LoRA and activation checkpointing", "--set activation_checkpointing=true"),
    ):
        remedies = json.loads(printed(*arguments, *chosen, code=1))["remedies"]
        (adapted,) = (one for one in remedies if "--adapter" in one["setting"])
        assert (adapted["change"], adapted["fit"]) == (change, "yes")
        assert setting in adapted["setting"]
        assert len(remedies) <= 3


def test_a_language_model_is_answered_with_activation_checkpointing_first(
    printed: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The usual recipes have it; a note says what leaving it out needs."""
    monkeypatch.setattr("shardmark.predict.models.Models", lambda: Adaptable(60e9))
    arguments = ("hf:Qwen/Qwen3-32B", "--on", "2x8xh100")
    text = printed(*arguments)
    assert text.startswith("Fastest: ")
    words = " ".join(text.split())
    assert "2x8xh100 it is planned with activation checkpointing" in words
    assert "without it" in words
    assert "AdamW, activation checkpointing" in words
    refused = ("--set", "activation_checkpointing=false")
    assert printed(*arguments, *refused, code=1).startswith("Nothing fits: ")
    several = printed(arguments[0], "--compare", "2x8xh100", "64x8xh100")
    assert "activation checkpointing where it is needed" in " ".join(several.split())


def test_recomputation_that_saves_nothing_is_not_chosen(
    printed: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The update needs most, with and without it: the answer would be slower, and as large."""
    made_models(monkeypatch, million_parameters=60_000.0)
    text = " ".join(printed("hf:Qwen/Qwen3-32B", "--on", "8xh100", code=1).split())
    assert text.startswith("Nothing fits: ")
    assert "AdamW, no activation checkpointing" in text


def test_fewer_samples_are_as_many_as_fit(
    printed: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of samples was assumed; one at once would be slow."""
    made = made_profile(sample_bytes=2e9)
    monkeypatch.setattr("shardmark.predict.models.Models", lambda: MadeModels(made))
    question = ("resnet50", "--on", "1xh100")
    remedies = json.loads(printed(*question, "--format", "json", code=1))["remedies"]
    fewer, *_ = remedies
    assert fewer["setting"].startswith("--batch ")
    batch = int(fewer["setting"].split()[-1])
    assert 1 < batch < 64
    assert fewer["change"] == f"{batch} samples"
    assert not any(" GPUs and " in one["change"] for one in remedies), "it is enough on one"
    printed(*question, "--batch", str(batch))
    printed(*question, "--batch", str(4 * batch), code=1)


def test_recomputation_by_which_a_faster_strategy_fits_is_chosen(
    printed: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FSDP fits without it, but waits for its gathers."""
    monkeypatch.setattr("shardmark.predict.models.Models", lambda: Adaptable(90e9))
    arguments = ("hf:Qwen/Qwen3-32B", "--on", "8xh200", "--adapter", "lora")
    chosen = json.loads(printed(*arguments, "--format", "json"))
    without = json.loads(
        printed(*arguments, "--set", "activation_checkpointing=false", "--format", "json")
    )
    (fast, slow) = (
        next(row for row in plan["rows"] if row["strategy"] == plan["answers"][0]["strategy"])
        for plan in (chosen, without)
    )
    assert (fast["fits"], slow["fits"]) == ("yes", "yes")
    assert fast["tokens_per_second"]["value"] > 1.2 * slow["tokens_per_second"]["value"]
    assert any("planned with activation checkpointing" in note for note in chosen["notes"])
    assert ", activation checkpointing" in chosen["assumed"]


def test_one_gpu_that_is_too_small_is_answered_by_more(
    printed: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`single`, the only strategy of the question, does not run on more."""
    made_models(monkeypatch, million_parameters=8_000.0)
    text = printed("hf:Qwen/Qwen3-8B", "--on", "1xh100", "--format", "json", code=1)
    last = json.loads(text)["remedies"][-1]
    assert (last["strategy"], last["fit"]) == ("fsdp", "yes")
    assert last["ranks"] > 1
    assert last["change"] == f"{last['ranks']} GPUs"


@pytest.mark.parametrize(("on", "named"), [("8xh100", True), ("1xh100", False)])
def test_more_gpus_are_named_where_they_are_not_far_more(
    printed: Printed, monkeypatch: pytest.MonkeyPatch, on: str, named: bool
) -> None:
    """400 billion parameters need about 100 cards."""
    made_models(monkeypatch, million_parameters=400_000.0)
    text = printed("hf:Qwen/Qwen3-32B", "--on", on, "--format", "json", code=1)
    assert any(" GPUs" in one["change"] for one in json.loads(text)["remedies"]) is named


def test_changes_that_are_not_enough_are_called_so(
    printed: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer alone is larger than a card, so that more cards do not help."""
    made_models(monkeypatch, million_parameters=8_000_000.0)
    text = printed("hf:Qwen/Qwen3-8B", "--on", "8xh100", code=1)
    assert "What would make it fit" not in text
    assert "What saves memory, but is not enough" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["resnet50"], "--on: no machine is given"),
        (["resnet50", "8xh100", "--on", "8xh100"], "8xh100: one argument too many"),
        (["resnet50", "--on", "8xh100", "--tokens", "many"], "--tokens or --samples: found 'many'"),
        (["resnet50", "--on", "8xh100", "--samples", "0"], "allowed is a number such as 10B"),
        (["resnet50", "--on", "8xh100", "--epochs", "3"], "--epochs: of how many samples"),
        (["gpt2", "--on", "8xh100", "--set", "epochs=3"], "without data; give --samples"),
        (["a" * 300, "--on", "8xh100"], "is no path: File name too long"),
        (["~nobody-of-this-name/x", "--on", "8xh100"], "is no path"),
        (["resnet50", "--on", "a" * 300], "is no path: File name too long"),
        (["resnet50", "--on", "8xh100", "--samples", "1,5M"], "found '1,5M'"),
        (["resnet50", "--on", "2x8xh100", "--nodes", "1..4"], "--nodes: found 1, 2 and 4, and"),
        (["resnet50", "--on", "2x", "--samples", "1"], "there is no node '2x'"),
        (["no-such-model", "--on", "8xh100"], "no-such-model: no such model"),
        (["{file}", "--on", "abacus"], "there is no node 'abacus'"),
        (["{file}", "--on", "h100x8", "--nodes", "none"], "--nodes: found 'none'"),
        (["{file}", "--on", "h100x8", "--from", "nowhere"], "nowhere"),
        (["resnet50", "--on", "8xh100", "--measured", "quick"], "--measured: found 'quick'"),
        (["resnet50", "--on", "8xh100", "--measured-batch", "8"], "--measured: it is not given"),
        (["{file}", "--on", "h100x8", "--set", "recipe.stepz=3"], "stepz"),
        (["{file}", "--on", "{node}"], "/node.yaml: card: there is no card 'abacus'"),
        (["{file}", "--on", "nowhere.yaml"], "there is no file"),
    ],
)
def test_mistakes_are_messages(
    printed: Printed,
    file: str,
    tmp_path: Path,
    arguments: list[str],
    message: str,
) -> None:
    node = tmp_path / "node.yaml"
    node.write_text("card: abacus\ndevices: 2\n")
    assert message in printed(*(word.format(file=file, node=node) for word in arguments), code=2)


@pytest.mark.parametrize(
    ("text", "amount"),
    [
        ("10B", 1e10),
        ("10 billion", 1e10),
        ("2.5bn", 2.5e9),
        ("1_000_000", 1e6),
        ("1e+9", 1e9),
        ("300M", 3e8),
        ("1.5t", 1.5e12),
        ("1e9", 1e9),
        ("156,000", 156e3),
        ("7", 7),
    ],
)
def test_amounts_of_work(text: str, amount: float) -> None:
    assert parse_amount(text) == amount


def test_the_table_of_machines_names_the_strategies_of_the_answers(printed: Printed) -> None:
    answers, _, table = printed(
        "resnet50", "--compare", "2x4090", "4xa100-40", "--price", "1"
    ).partition("\n\n")
    for answer in ("Cheapest: ", "Fastest: "):
        named = answers.partition(answer)[2].partition(" on ")[0]
        assert not named or named in table


def test_many_cells_are_answered_by_the_best_of_each_strategy(printed: Printed) -> None:
    text = printed("llama-1b", "--on", "8xh100")
    assert len(text.splitlines()) <= 28
    assert max(map(len, text.splitlines())) <= 80
    note = " ".join(text.partition("The best of each strategy in 24 rows")[2].split())
    assert "Here: sequence_length 2048 and activation_checkpointing" in note
    assert sum(line.startswith("zero-1 ") for line in text.splitlines()) == 1
    speed = printed("llama-1b", "--on", "8xh100", "--speed")
    assert sum(line.startswith("zero-1 ") for line in speed.splitlines()) > 4


def test_the_software_of_an_answer_is_named(printed: Printed) -> None:
    """Software of 2024 is the default of language models, and pictures have none to choose."""
    answers = [("hf:Qwen/Qwen3-8B", "runs with FlashAttention (--stack eager: without)"),
               ("hf:Qwen/Qwen3-8B --stack eager", "runs without FlashAttention"),
               ("resnet50", "published runs on other machines")]  # fmt: skip
    speeds = []
    for question, said in answers:
        text = printed(*question.split(), "--on", "1xh200")
        assert said in " ".join(text.split())
        assert "GiB of each card" in " ".join(text.partition("\n\n")[0].split()), "it fits"
        document = printed(*question.split(), "--on", "1xh200", "--format", "json")
        speeds.append(json.loads(document))
    assert [answer["stack"] for answer in speeds] == ["fused", "eager", "eager"]


def test_a_measured_speed_narrows_the_range(printed: Printed) -> None:
    question = ("hf:Qwen/Qwen3-8B", "--on", "1xa100-80", "--batch", "4")
    text = printed(*question, "--measured", "9,000 tokens/s")
    assert "9k tokens/s" in text
    assert "Predicted from measured 9,000 tokens/s" in " ".join(text.split())
    assert "Published:" not in text
    assert "Published:" in printed(*question)


def test_a_model_from_python() -> None:
    plan = shardmark.plan("resnet50", "2x8xh100", per_rank_batch=8, work=5e6)
    assert {(row.ranks, row.nodes, row.samples) for row in plan.rows} == {(16, 2, 128)}
    assert (plan.precision, plan.work) == ("bf16", 5e6)
    with pytest.raises(InputError, match="no such model"):
        shardmark.plan("resnet5", "8xh100")
