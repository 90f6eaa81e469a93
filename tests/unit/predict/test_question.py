"""Questions about a model by its name: which experiment is predicted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardmark.base.errors import InputError
from shardmark.experiment.matrix import cells_of_any_size
from shardmark.predict.remedies import CHANGES, SMALLER_STATE, Change, fewer_samples
from shardmark.predict.request import PlanRequest
from shardmark.predict.tasks.transformers_model import TransformersModel
from shardmark.ranks.workloads.language.options import LanguageOptions

TASK = """
class Task:
    def model(self): ...
    def train_data(self): ...
    def validation_data(self): ...
    def loss(self, model, batch): ...

class Net:
    def __init__(self, num_classes): ...
    def forward(self, pictures): ...

def reads(vocabulary, sequence_length): ...
"""


def about(name: str, *machines: str, **options: Any) -> PlanRequest:
    return PlanRequest(subject=name, machines=machines or ("8xh100",), **options).resolved()


@pytest.mark.parametrize(
    ("name", "workload", "batch"),
    [
        ("resnet50", {"name": "classification", "model": "resnet50", "image_size": 224}, 64),
        ("timm:vit_tiny_patch16_224", {"model": "timm:vit_tiny_patch16_224"}, 64),
        (
            "fasterrcnn_resnet50_fpn",
            {"name": "detection", "weights": "imagenet", "min_size": 923},
            2,
        ),
        ("fasterrcnn_mobilenet_v3_large_320_fpn", {"name": "detection", "min_size": 370}, 2),
        ("maskrcnn_swin_t_fpn", {"name": "detection", "model": "maskrcnn_swin_t_fpn"}, 2),
        ("hf:Qwen/Qwen3-8B", {"name": "language", "sequence_length": 4096}, 1),
        ("Qwen/Qwen3-8B/", {"model": "hf:Qwen/Qwen3-8B", "dataset": "random"}, 1),
        ("hf:openai-community/gpt2", {"sequence_length": 1024}, 1),
        ("gpt2", {"model": "hf:openai-community/gpt2", "sequence_length": 1024}, 1),
        ("hf:gpt2", {"model": "hf:openai-community/gpt2", "sequence_length": 1024}, 1),
        ("microsoft/resnet-50", {"name": "classification", "model": "resnet50"}, 64),
        ("hf:google-bert/bert-base-uncased", {"objective": "masked", "sequence_length": 512}, 1),
        ("hf:llama", {"model": "hf:llama", "vocabulary": 32_000}, 1),
        ("hf:openai/whisper-small", {"name": "own"}, 8),
        ("google/vit-base-patch16-224", {"name": "own"}, 64),
        ("task.py:Task", {"name": "own", "task": "task.py:Task"}, 8),
        ("task.py:Net", {"name": "classification", "model": "task.py:Net"}, 64),
        ("task.py:reads", {"name": "language", "model": "task.py:reads"}, 8),
    ],
)
def test_what_a_name_means(
    name: str,
    workload: dict[str, Any],
    batch: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "task.py").write_text(TASK)
    question = about(name)
    chosen = question.experiment.workload.model_dump()
    assert {key: chosen[key] for key in workload} == workload
    assert question.experiment.recipe.per_rank_batch == batch
    assert question.assumed is not None
    assert f"{batch} " in question.assumed


def test_files_of_a_model(tmp_path: Path) -> None:
    """Weights do not change the answer, so that a folder is read without them."""
    configuration = {"model_type": "llama", "vocab_size": 99, "max_position_embeddings": 64}
    (tmp_path / "config.json").write_text(json.dumps(configuration))
    for name in (str(tmp_path), f"hf:{tmp_path}", f"hf:{tmp_path}/config.json"):
        workload = about(name).experiment.workload.model_dump()
        assert workload["model"] == f"hf:{tmp_path}/config.json"
        assert workload["sequence_length"] == 64
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InputError, match="name a config"):
        about(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "length", "options", "assumed"),
    [
        ("hf:google-t5/t5-large", None, {"sequence_length": 512}, "512 tokens and 114 of target"),
        ("hf:google-t5/t5-large", 1024, {"sequence_length": 1024}, "1024 tokens and 228 of target"),
        ("hf:facebook/bart-large", None, {"sequence_length": 512}, "512 tokens and 512 of target"),
        ("hf:openai/whisper-large-v3", None, {"target_length": 448}, "30 s, 1500 positions, and"),
        ("hf:openai/whisper-large-v3", 96, {"target_length": 96}, "and 96 of text"),
    ],
)
def test_both_sides_of_an_encoder_and_decoder_are_assumed(
    name: str, length: int | None, options: dict[str, int], assumed: str
) -> None:
    """T5's own task has 114 tokens of targets for 512 of its input."""
    question = about(name, sequence_length=length)
    chosen = question.experiment.workload.model_dump()["options"]
    assert chosen == {"model": name, **options}
    assert assumed in str(question.assumed)


@pytest.mark.parametrize("given", ["world_size=4", "world_size=[4,8]", "nodes=2"])
def test_ranks_are_those_of_the_machine(given: str) -> None:
    with pytest.raises(InputError, match="the machine says it: --on 4xh100"):
        about("resnet50", overrides=(given,))
    assert about("resnet50", overrides=("world_size=8",)).assumed


def test_images_of_a_detector_are_those_of_coco() -> None:
    assumed = str(about("fasterrcnn_resnet50_fpn").assumed)
    assert "2 images of 923 x 923 (COCO's mean; " in assumed
    assert "first layers of its backbone frozen" in assumed
    others = ("workload.min_size=600", "workload.weights=null")
    changed = str(about("fasterrcnn_resnet50_fpn", overrides=others).assumed)
    assert "2 images of 600 x 600 a GPU" in changed
    assert "frozen" not in changed


def test_machines_choose_strategies_and_precision() -> None:
    def of(*machines: str) -> tuple[list[Any], str]:
        experiment = about("resnet50", *machines).experiment
        return experiment.matrix["strategy"], experiment.recipe.precision

    assert of("1xh100") == (["single"], "bf16")
    strategies, precision = of("2x8xa100-80")
    assert (len(strategies), precision) == (6, "bf16")
    assert {"name": "fsdp-hybrid", "shard_group": 8} in strategies
    assert of("8xh100", "4xt4")[1] == "fp16", "the first precision that all cards have"
    assert of("8xgtx-1080-ti")[1] == "fp32"
    assert about("resnet50", precision="fp32").experiment.recipe.precision == "fp32"


def test_options_of_a_question() -> None:
    question = about("hf:Qwen/Qwen3-8B", batch=2, sequence_length=512)
    assert question.experiment.recipe.per_rank_batch == 2
    assert question.experiment.workload.tokens_per_sample == 512
    assert "2 sequences of 512 tokens a GPU" in str(question.assumed)
    changed = about("resnet50", overrides=["recipe.activation_checkpointing=true"])
    assert changed.experiment.recipe.activation_checkpointing
    assert "no activation checkpointing" not in str(changed.assumed)
    preset = about("llama-1b", batch=3)
    assert preset.experiment.recipe.per_rank_batch == 3
    assert preset.assumed is None


@pytest.mark.parametrize("change", [*CHANGES, *SMALLER_STATE], ids=lambda change: change.name)
def test_settings_that_a_plan_proposes_can_be_given(change: Change) -> None:
    option, value = change.setting.split()
    name = option.lstrip("-")
    options: dict[str, Any] = {
        "set": {"overrides": [value]},
        "adapter": {"adapter": value},
        "batch": {"batch": int(value) if value.isdigit() else None},
    }
    (cell, *_), _ = cells_of_any_size(about("hf:Qwen/Qwen3-8B", **options[name]).experiment)
    changed = change.applied(cell)
    assert (changed.recipe, changed.workload) == (cell.recipe, cell.workload)


def test_fewer_samples_keep_the_passes_of_a_step() -> None:
    name, passes = "hf:Qwen/Qwen3-8B", "recipe.gradient_accumulation=4"
    (cell, *_), _ = cells_of_any_size(about(name, batch=16, overrides=[passes]).experiment)
    two, one = fewer_samples(cell, 8)
    assert (two.name, two.setting, one.name, one.setting) == (
        *("2 samples", "--batch 8"),
        *("1 sample", "--batch 4"),
    )
    (asked, *_), _ = cells_of_any_size(about(name, batch=8, overrides=[passes]).experiment)
    assert two.applied(cell).recipe == asked.recipe
    of_all = cell.recipe.model_copy(update={"per_rank_batch": None, "global_batch": 128})
    two, _ = fewer_samples(cell.changed(recipe=of_all), 8)
    assert two.setting == "--set recipe.global_batch=64"


def test_only_optimizers_that_have_one_are_fused() -> None:
    (fused,) = (change for change in CHANGES if change.name == "fused optimizer")
    for name, implementation in (("muon", "fused"), ("adafactor", "default")):
        question = about("hf:gpt2", overrides=[f"recipe.optimizer={{name: {name}}}"])
        (cell, *_), _ = cells_of_any_size(question.experiment)
        assert fused.applied(cell).recipe.optimizer.implementation == implementation


@pytest.mark.parametrize(
    ("name", "key", "sample"),
    [
        ("black-forest-labs/FLUX.1-dev", "workload.options.image_size=512", "1 image of 512 x 512"),
        ("resnet50", "workload.image_size=96", "64 images of 96 x 96"),
        ("Qwen/Qwen3-8B", "workload.sequence_length=1024", "1 sequence of 1024 tokens"),
        ("whisper-small", "workload.options.target_length=64", "positions, and 64 of text"),
    ],
)
def test_the_sample_has_the_size_that_was_set(name: str, key: str, sample: str) -> None:
    assert sample in str(about(name, overrides=[key]).assumed)


def test_old_programs_store_all_scores_of_attention() -> None:
    """63 GB on an A100 for large-v3 with 4 samples, yeyupiaoling/Whisper-Finetune, issue 30."""
    options = about("whisper-large-v3", stack="eager").experiment.workload.model_dump()["options"]
    assert options["attention"] == "eager"
    assert options["model"] == "hf:openai/whisper-large-v3"
    model = TransformersModel("hf:openai/whisper-tiny", attention="eager").model()
    assert model.config._attn_implementation == "eager"  # type: ignore[union-attr]


def test_what_a_loss_in_pieces_saves_is_said() -> None:
    """12 bytes a logit; in traces of 2,048 and 8,192 tokens of 151,936 words one piece needs 1.73
    and 6.9 GiB more than two."""
    logits = 2 * 4096 * 151_936
    more = f"in one, without Liger: up to {6 * logits / 2**30:.2g} GiB more"
    assert f"loss in 2 pieces ({more})" in str(about("hf:Qwen/Qwen3-8B", batch=2).assumed)
    assert "pieces" not in str(about("hf:Qwen/Qwen3-8B", stack="eager").assumed)
    assert "up to 110 GiB more" in str(about("Qwen3-14B", sequence_length=131_072).assumed)
    for name in ("google/gemma-3-27b-it", "Llama-4-Scout-17B-16E-Instruct", "Qwen3-VL-8B-Instruct"):
        assert "loss in 2 pieces" in str(about(name).assumed), name


def test_only_optimizers_with_a_state_in_8_bits_get_it() -> None:
    eight_bits, _ = SMALLER_STATE
    for name, bits in (("adamw", 8), ("sgd", 32)):
        question = about("hf:gpt2", overrides=[f"recipe.optimizer={{name: {name}}}"])
        (cell, *_), _ = cells_of_any_size(question.experiment)
        assert eight_bits.applied(cell).recipe.optimizer.state_bits == bits


def test_only_losses_of_known_output_layers_are_computed_in_pieces() -> None:
    (pieces,) = (change for change in CHANGES if change.name == "loss in 8 pieces")
    for name, count in (("hf:gpt2", 8), ("task.py:reads", 1)):
        (cell, *_), _ = cells_of_any_size(about("hf:gpt2").experiment)
        cell = cell.changed(workload=cell.workload.model_copy(update={"model": name}))
        options = pieces.applied(cell).workload
        assert isinstance(options, LanguageOptions)
        assert options.loss_chunks == count


@pytest.mark.parametrize(
    ("optimizer", "name"),
    [
        ("{name: adamw, state_bits: 8}", "AdamW of 8-bit state"),
        ("{name: muon}", "Muon"),
        ("{name: lamb}", "LAMB"),
        ("{name: own, path: 'torch.optim:RMSprop'}", "RMSprop"),
    ],
)
def test_the_assumed_optimizer_is_named(optimizer: str, name: str) -> None:
    question = about("hf:gpt2", overrides=[f"recipe.optimizer={optimizer}"])
    assert f", {name}, " in str(question.assumed)


def test_adapters_of_a_question() -> None:
    """Frozen weights are in 16 bits where the card computes so."""

    def base(name: str, *machines: str, **options: Any) -> str:
        question = about(name, *machines, **options)
        adapter = question.experiment.workload.model_dump()["adapter"]
        if question.assumed is not None:
            assert f"LoRA of rank 8 beside {adapter['base']} weights" in question.assumed
        return str(adapter["base"])

    assert base("hf:Qwen/Qwen3-8B", adapter="lora") == "bf16"
    assert base("hf:Qwen/Qwen3-8B", adapter="QLoRA") == "nf4"
    assert base("hf:Qwen/Qwen3-8B", adapter="lora", precision="fp32") == "fp32"
    assert base("hf:Qwen/Qwen3-8B", "1xt4", adapter="lora") == "fp16", "a card without bf16"
    assert base("llama-1b", adapter="lora", precision="bf16") == "bf16"
    with pytest.raises(InputError, match="resnet50 takes no adapter"):
        about("resnet50", adapter="lora")
    with pytest.raises(InputError, match="allowed are lora and qlora"):
        about("hf:Qwen/Qwen3-8B", adapter="ia3")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("resnet5", "no such model; allowed are .*nearest.*resnet"),
        ("mistral-small", "no such model; .*nearest: 'mistralai/Mistral-Small-24B"),
        ("hf:Qwen/Qwen3-9B", "its sizes are not in the package.*nearest.*hf:Qwen/Qwen3-8B"),
        (
            "someone/new-7B",
            "hf download someone/new-7B config.json --local-dir new-7B.*`shardmark plan hf:new-7B`",
        ),
        ("missing.yaml", "no such file, and no such preset"),
        ("missing.json", "no such file; name a config.json that is there"),
        ("missing.py:Task", "no file 'missing.py'"),
    ],
)
def test_unknown_names_are_refused(name: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        about(name)


def test_names_of_copies_have_the_sizes_of_the_original() -> None:
    question = about("unsloth/Qwen3-8B-Instruct-bnb-4bit")
    workload = question.experiment.workload
    assert isinstance(workload, LanguageOptions)
    assert workload.model == "hf:Qwen/Qwen3-8B"
    assert str(question.assumed).startswith("the sizes of Qwen/Qwen3-8B, 1 sequence of 4096")
    assert "the sizes of" not in str(about("hf:Qwen/Qwen3-8B").assumed)
    assert "1 video of 81 frames of 640 x 640" in str(about("Wan2.1-1.3B").assumed)
    assert "sample of 10 s a GPU" in str(about("facebook/wav2vec2-base", batch=1).assumed)


def test_a_model_of_text_and_pictures_has_the_length_of_its_text() -> None:
    workload = about("qwen2-vl-7b-instruct").experiment.workload
    assert isinstance(workload, LanguageOptions)
    assert (workload.model_rows, workload.tokens_per_sample) == (152064, 4096)


def test_a_scan_that_is_computed_step_by_step_is_not_traced(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    with pytest.raises(InputError, match=r"its scan cannot be traced.*file\.py:Task"):
        about(str(tmp_path))


def test_a_file_that_is_no_python_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "task.py").write_text("class Net(:\n")
    with pytest.raises(InputError, match="not valid Python source"):
        about("task.py:Net")


@pytest.mark.parametrize(
    "content",
    [
        {"model_type": "llama", "max_position_embeddings": "8192"},
        {"model_type": "llama", "text_config": None},
        {"model_type": ["llama"]},
        {"_class_name": ["UNet2DConditionModel"]},
    ],
)
def test_a_configuration_with_other_values_is_refused(
    content: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(InputError, match=r"no configuration: .*; name a config\.json"):
        about(str(tmp_path))


def test_pictures_have_no_sequence_length() -> None:
    with pytest.raises(InputError, match="--sequence-length: resnet50 has no sequences"):
        about("resnet50", sequence_length=128)
