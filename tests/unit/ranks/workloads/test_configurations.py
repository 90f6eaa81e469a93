"""Shipped configurations build models with the published numbers of parameters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import default_collate

from shardmark.base.errors import InputError
from shardmark.base.recipe import Recipe
from shardmark.predict.model_name import named_model
from shardmark.predict.models import Models
from shardmark.predict.tasks.diffusers_model import DiffusersModel
from shardmark.predict.tasks.transformers_model import TransformersModel
from shardmark.ranks.workloads import build_workload, options
from shardmark.ranks.workloads.configurations import (
    CLASS,
    CLASSES,
    NOISE_MODELS,
    shipped,
    stored_configuration,
)
from shardmark.ranks.workloads.language.hugging_face import active_parameters
from shardmark.ranks.workloads.language.options import ENCODERS
from shardmark.ranks.workloads.language.tokens import token_data
from shardmark.ranks.workloads.model_building import build_model

LLAMA = {
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
SOUND = {
    **{"vocab_size": 12, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "conv_dim": [4] * 7, "num_conv_pos_embedding_groups": 2},
    **{"num_conv_pos_embeddings": 8, "mask_time_length": 2, "mask_time_prob": 0.1},
}
DETECTOR = {
    **{"d_model": 16, "encoder_hidden_dim": 16, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16},
    **{"encoder_attention_heads": 2, "decoder_attention_heads": 2, "decoder_layers": 2},
    **{"num_queries": 20, "num_labels": 5, "encoder_in_channels": [16, 16, 16]},
    **{"decoder_in_channels": [16, 16, 16]},
    "backbone_config": {
        **{"model_type": "rt_detr_resnet", "embedding_size": 8, "hidden_sizes": [8, 16, 16, 16]},
        **{"depths": [1] * 4, "layer_type": "basic"},
        "out_features": ["stage2", "stage3", "stage4"],
    },
}
TRANSLATOR: dict[str, Any] = {
    **{"vocab_size": 50, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2},
    **{"encoder_attention_heads": 2, "decoder_attention_heads": 2, "pad_token_id": 0},
    **{"encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "max_position_embeddings": 12},
    **{"decoder_start_token_id": 1, "bos_token_id": 1, "eos_token_id": 2},
}
SMALL: dict[str, dict[str, Any]] = {
    "t5": {"vocab_size": 50, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2},
    **dict.fromkeys(("bart", "m2m_100", "marian", "mbart", "pegasus"), TRANSLATOR),
    "vit": {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 56},
    "dinov2": {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2},
    "whisper": {
        **{"vocab_size": 60, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1},
        **{"encoder_attention_heads": 2, "decoder_attention_heads": 2, "pad_token_id": 0},
        **{"max_source_positions": 20, "max_target_positions": 8, "decoder_start_token_id": 1},
        **{"encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "bos_token_id": 1, "eos_token_id": 2},
    },
    "clip": {
        "text_config": {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
        | {"num_attention_heads": 2, "vocab_size": 50, "eos_token_id": 2},
        "vision_config": {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
        | {"num_attention_heads": 2, "patch_size": 32, "image_size": 64},
    },
    "dinov3_vit": {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    | {"num_attention_heads": 2, "patch_size": 56},
    "wav2vec2": SOUND,
    "hubert": SOUND,
    "rt_detr": DETECTOR,
    "rt_detr_v2": DETECTOR,
    "d_fine": {
        **DETECTOR,
        "backbone_config": {
            **{"model_type": "hgnet_v2", "stem_channels": [3, 8, 8]},
            **{"stage_in_channels": [8, 8, 16, 16], "stage_mid_channels": [4, 4, 4, 4]},
            **{"stage_out_channels": [8, 16, 16, 16], "hidden_sizes": [8, 16, 16, 16]},
            **{"stage_num_blocks": [1] * 4, "stage_numb_of_layers": [1] * 4},
            "out_features": ["stage2", "stage3", "stage4"],
        },
    },
}
SMALL["siglip"] = SMALL["clip"]

HEADS = {"num_attention_heads": 2, "attention_head_dim": 8}
BLOCKS = {
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D"],
    "up_block_types": ["CrossAttnUpBlock2D", "UpBlock2D"],
    **{"block_out_channels": [8, 16], "norm_num_groups": 4, "attention_head_dim": 4},
}
SMALL_NOISE: dict[str, dict[str, Any]] = {
    "UNet2DConditionModel": {
        **BLOCKS,
        **{"sample_size": 16, "cross_attention_dim": 16, "addition_embed_type": "text_time"},
        **{"addition_time_embed_dim": 4, "projection_class_embeddings_input_dim": 32},
    },
    "DiTTransformer2DModel": {**HEADS, "num_layers": 2, "sample_size": 8},
    "PixArtTransformer2DModel": {
        **HEADS,
        **{"num_layers": 2, "sample_size": 8, "caption_channels": 12, "cross_attention_dim": 16},
    },
    "SD3Transformer2DModel": {
        **HEADS,
        **{"num_layers": 2, "sample_size": 8, "joint_attention_dim": 12, "in_channels": 4},
        **{"caption_projection_dim": 16, "pooled_projection_dim": 6, "out_channels": 4},
    },
    "FluxTransformer2DModel": {
        **HEADS,
        **{"num_layers": 1, "num_single_layers": 1, "joint_attention_dim": 12, "in_channels": 4},
        **{"pooled_projection_dim": 6, "guidance_embeds": True, "axes_dims_rope": [2, 2, 4]},
    },
    "Flux2Transformer2DModel": {
        **HEADS,
        **{"num_layers": 1, "num_single_layers": 1, "joint_attention_dim": 12, "in_channels": 4},
        **{"timestep_guidance_channels": 8, "axes_dims_rope": [2, 2, 2, 2]},
    },
    "QwenImageTransformer2DModel": {
        **HEADS,
        **{"num_layers": 2, "joint_attention_dim": 12, "in_channels": 4, "out_channels": 1},
        "axes_dims_rope": [2, 2, 4],
    },
    "WanTransformer3DModel": {
        **HEADS,
        **{"num_layers": 2, "text_dim": 12, "freq_dim": 8, "ffn_dim": 16, "in_channels": 4},
        "out_channels": 4,
    },
}


def file_of(content: dict[str, Any], tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(content))
    return f"hf:{path}"


@pytest.mark.slow
@pytest.mark.parametrize("name", shipped())
def test_the_sizes_give_the_published_number_of_parameters(name: str) -> None:
    """`plan` builds them, within 2 %; a classifier that is not published does not count."""
    entry = shipped()[name]
    workload = build_workload(options(named_model(f"hf:{name}").workload), 0)
    with torch.device("meta"):
        model = workload.build_model()
    unpublished = ("classifier.",) if entry["configuration"].get("model_type") == "dinov2" else ()
    numbers = [p.numel() for n, p in model.named_parameters() if not n.startswith(unpublished)]
    assert sum(numbers) == pytest.approx(entry["parameters"], rel=0.02)
    assert entry["source"]


def test_there_are_at_least_139_with_every_family() -> None:
    configurations = [entry["configuration"] for entry in shipped().values()]
    kinds = {configuration.get("model_type") for configuration in configurations}
    families = {"llama", "qwen2", "qwen3", "mistral", "mixtral", "gemma", "phi", "gpt2", "gpt_neox"}
    assert families | set(ENCODERS) | set(CLASSES) <= kinds
    assert {each[CLASS] for each in configurations if CLASS in each} == {*NOISE_MODELS}
    assert len(shipped()) >= 139


@pytest.mark.parametrize(
    ("name", "model", "image_size", "parameters"),
    [
        ("hf:microsoft/resnet-50", "resnet50", 224, 25_557_032),
        ("resnet-18", "resnet18", 224, 11_689_512),
        ("microsoft/swin-tiny-patch4-window7-224", None, 224, 28_288_354),
        ("microsoft/swin-base-patch4-window12-384-in22k", None, 384, 87_903_584),
        ("microsoft/swinv2-base-patch4-window16-256", "timm:swinv2_base_window16_256", 256, None),
        ("facebook/convnext-large-384-22k-1k", "convnext_large", 384, 197_767_336),
        ("facebook/convnextv2-tiny-22k-224", "timm:convnextv2_tiny", 224, 28_635_496),
        ("facebook/deit-base-distilled-patch16-384", None, 384, None),
        ("google/vit-base-patch16-384", "timm:vit_base_patch16_384", 384, 86_859_496),
        ("google/vit-huge-patch14-224-in21k", "timm:vit_huge_patch14_224", 224, 632_045_800),
        ("microsoft/beit-large-patch16-512", None, 512, 305_674_728),
        ("google/efficientnet-b4", "efficientnet_b4", 380, 19_341_616),
        ("me/vit-base-patch16-224-2", "timm:vit_base_patch16_224", 224, None),
        ("me/resnet-50-10", "resnet50", 224, 25_557_032),
        ("timm:maxvit_tiny_tf_384", None, 384, None),
        ("timm:regnetx_320", None, 224, None),
        ("facebook/regnet-y-040", "timm:regnety_040", 224, 20_646_656),
        ("timm:vit_base_patch16_384.augreg_in1k", None, 384, 86_859_496),
    ],
)
def test_models_of_images_are_those_of_torchvision_or_timm(
    name: str, model: str | None, image_size: int, parameters: int | None
) -> None:
    """The numbers are those of transformers' classes with the published sizes."""
    workload = named_model(name).workload
    assert workload["name"] == "classification"
    assert model in (None, workload["model"])
    assert workload["image_size"] == image_size
    with torch.device("meta"):
        built = build_model(workload["model"], {}, classes=1000, image_size=image_size, seed=0)
    assert parameters in (None, sum(p.numel() for p in built.parameters()))


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ({"model_type": "resnet"}, "resnet is no language model in transformers"),
        (
            {"model_type": "of-tomorrow", "vocab_size": 300},
            r"transformers [\d.]+ has no such model",
        ),
    ],
)
def test_a_file_of_another_model_is_refused_with_the_way_to_ask(
    content: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    chosen = {"name": "language", "model": file_of(content, tmp_path), "vocabulary": 300}
    workload = build_workload(options(chosen | {"dataset": "random", "sequence_length": 8}), 0)
    with pytest.raises(InputError, match=rf"{problem}.*timm:NAME.*file\.py:Task") as refused:
        workload.build_model()
    assert len(str(refused.value)) < 500, "no list of all models"


def test_a_file_takes_precedence_over_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    name = "hf:Qwen/Qwen3-8B"
    assert (stored_configuration(name) or {})["hidden_size"] == 4096
    (tmp_path / "Qwen/Qwen3-8B").mkdir(parents=True)
    (tmp_path / "Qwen/Qwen3-8B/config.json").write_text('{"hidden_size": 8}')
    assert stored_configuration(name) == {"hidden_size": 8}
    assert stored_configuration("hf:nobody/nothing") is None


def test_the_vocabulary_of_a_configuration_counts(tmp_path: Path) -> None:
    """Without `workload.vocabulary` the model had as many rows as the tokenizer has tokens."""
    model = file_of(LLAMA, tmp_path)
    built = build_workload(options({"name": "language", "model": model}), 0).build_model()
    assert built.get_input_embeddings().weight.shape[0] == 300  # type: ignore[operator]
    few = file_of({**LLAMA, "vocab_size": 100}, tmp_path)
    with pytest.raises(InputError, match=r"need 258 rows.*has 100; use the tokenizer"):
        build_workload(options({"name": "language", "model": few}), 0)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(InputError, match="it has no keys; use a config"):
        build_workload(options({"name": "language", "model": few}), 0)


def test_random_tokens_need_no_text(tmp_path: Path) -> None:
    model = file_of(LLAMA, tmp_path)
    sizes = {"sequence_length": 16, "training_samples": 5, "validation_samples": 2}
    chosen = options({"name": "language", "model": model, "dataset": "random", **sizes})
    workload = build_workload(chosen, 0)
    assert (workload.training_samples, workload.validation_samples) == (5, 2)
    assert workload.synthetic
    masked = options(
        {"name": "language", "dataset": "random", "vocabulary": 40, "objective": "masked", **sizes}
    )
    tokens = token_data(masked)  # type: ignore[arg-type]
    assert tokens.mask == 39 > tokens.training.tokens.max()
    with pytest.raises(InputError, match=r"random: gpt says nowhere.*set workload.vocabulary"):
        build_workload(options({"name": "language", "dataset": "random"}), 0)
    with pytest.raises(ValueError, match="tokenizer has no effect"):
        options({"name": "language", "dataset": "random", "tokenizer": {"bpe": 300}})


def test_models_of_other_tasks_are_refused_by_language() -> None:
    with pytest.raises(ValueError, match="neither a causal nor a masked language model"):
        options({"name": "language", "model": "hf:openai/whisper-small"})
    with pytest.raises(ValueError, match="needs objective: masked"):
        options({"name": "language", "model": "hf:FacebookAI/roberta-base"})


def test_a_decoder_is_not_built_without_its_encoder(tmp_path: Path) -> None:
    """transformers builds the decoder alone as a causal language model."""
    content = file_of({"model_type": "prophetnet", "vocab_size": 300}, tmp_path)
    chosen = options(
        {"name": "language", "model": content, "dataset": "random", "sequence_length": 8}
    )
    with pytest.raises(InputError, match="prophetnet has an encoder and a decoder; name a task"):
        build_workload(chosen, 0).build_model()


@pytest.mark.parametrize("kind", ENCODERS)
def test_encoders_with_the_vocabulary_of_their_configuration_compute(
    kind: str, tmp_path: Path
) -> None:
    """RoBERTa counts positions from the padding, which was removed from every configuration."""
    sizes = {**LLAMA, "model_type": kind, "max_position_embeddings": 40, "pad_token_id": 1}
    data = {"dataset": "random", "objective": "masked", "sequence_length": 8}
    chosen = options({"name": "language", "model": file_of(sizes, tmp_path), **data})
    model = build_workload(chosen, 0).build_model()
    logits = model(torch.arange(2, 10)[None]).logits
    assert logits.shape == (1, 8, 300)


@pytest.mark.parametrize("kind", CLASSES)
def test_models_of_other_tasks_train_on_random_inputs(kind: str, tmp_path: Path) -> None:
    content = {"model_type": kind, **SMALL[kind]}
    task = TransformersModel(file_of(content, tmp_path), sequence_length=6)
    model = task.model()
    sample = task.train_data()[0]
    batch = {name: torch.stack([value, value]) for name, value in sample.items()}
    loss = task.loss(model, batch)
    loss.backward()  # type: ignore[no-untyped-call]
    assert loss.isfinite()
    layers = task.blocks(model)
    assert layers
    assert all(p.grad is not None for layer in layers for p in layer.parameters())
    with pytest.raises(InputError, match="found the type llama"):
        TransformersModel(file_of(LLAMA, tmp_path))


@pytest.mark.parametrize("kind", NOISE_MODELS)
def test_models_that_predict_noise_train_on_random_latents(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("diffusers")
    name = file_of({CLASS: kind, **SMALL_NOISE[kind]}, tmp_path)
    task = DiffusersModel(name, image_size=64)
    model = task.model()
    total = task.loss(model, default_collate([*task.train_data()[:2]]))
    total.backward()  # type: ignore[no-untyped-call]
    blocks = task.blocks(model)
    assert len(blocks) == {"UNet2DConditionModel": 18}.get(kind, 2)
    last = kind == "QwenImageTransformer2DModel"  # whose output for the text is not used
    used = blocks[: len(blocks) - last]
    assert all(p.grad is not None for block in used for p in block.parameters())
    with pytest.raises(InputError, match="found 60; use a multiple of 16 pixels"):
        DiffusersModel(name, image_size=60)
    with pytest.raises(InputError, match="found the class AutoencoderKL; allowed are UNet2D"):
        DiffusersModel(file_of({CLASS: "AutoencoderKL"}, tmp_path))
    with pytest.raises(ValueError, match="neither a causal nor a masked language model"):
        options({"name": "language", "model": "hf:black-forest-labs/FLUX.1-dev"})


@pytest.mark.parametrize(("kind", "parameters"), [("wav2vec2", 0), ("rt_detr", 10**9)])
def test_sound_takes_no_real_steps_and_detectors_do(
    kind: str, parameters: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sound took a step of minutes on the CPU in fp16, with twice the memory; the real step of a
    detector got fakes from a cache of transformers."""
    monkeypatch.setattr("shardmark.predict.trace.trace.REAL_PARAMETERS", parameters)
    name = file_of({"model_type": kind, **SMALL[kind]}, tmp_path)
    recipe = Recipe(per_rank_batch=1, steps=1, precision="fp16")
    profile = Models().profile(options(named_model(name).workload), recipe, steps="autocast")
    assert profile.units


def test_a_configuration_of_wrong_types_says_which_key(tmp_path: Path) -> None:
    path = file_of({"model_type": "llama", "hidden_size": "768"}, tmp_path)
    with pytest.raises(InputError, match="'hidden_size' expected int, got str"):
        Models().profile(options(named_model(path).workload), Recipe(per_rank_batch=1, steps=1))


def test_samples_have_the_tokens_of_encoder_and_decoder(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    t5 = TransformersModel(file_of({"model_type": "t5", **SMALL["t5"]}, tmp_path), 20, 5)
    assert t5.tokens(t5.train_data()) == [25] * 16
    assert {len(sample["labels"]) for sample in t5.train_data()} == {5}
    bart = file_of({"model_type": "bart", **TRANSLATOR}, tmp_path)
    assert TransformersModel(bart, 12).tokens([{}]) == [12 + 12]
    with pytest.raises(InputError, match=r"sequence_length: found 13, .* has 12 positions"):
        TransformersModel(bart, 13)
    model = file_of({"model_type": "whisper", **SMALL["whisper"]}, tmp_path)
    assert TransformersModel(model).tokens([{}]) == [20 + 8]
    with pytest.raises(InputError, match="has 8 positions; use at most 8"):
        TransformersModel(model, target_length=9)
    for kind in ("vit", "rt_detr"):  # the second has an encoder and a decoder, of images
        assert not hasattr(TransformersModel(file_of({"model_type": kind}, tmp_path)), "tokens")


@pytest.mark.parametrize(
    ("name", "active"),
    [
        ("mistralai/Mixtral-8x7B-v0.1", 12.9),
        ("Qwen/Qwen3-30B-A3B", 3.3),
        ("Qwen/Qwen3-235B-A22B", 22),
        ("allenai/OLMoE-1B-7B-0924", 1.3),
        ("deepseek-ai/DeepSeek-V3", 37),
        ("moonshotai/Kimi-K2-Instruct", 32.6),
        ("openai/gpt-oss-120b", 5.7),
        ("google/gemma-4-26B-A4B", 3.8 + 0.57),  # and the part for images
    ],
)
def test_the_parameters_of_a_token_are_the_published_ones(name: str, active: float) -> None:
    """The numbers are in billions, as the authors round them."""
    workload = build_workload(options(named_model(f"hf:{name}").workload), 0)
    with torch.device("meta"):
        model = workload.build_model()
    assert active_parameters(model) == pytest.approx(1e9 * active, rel=0.02)
