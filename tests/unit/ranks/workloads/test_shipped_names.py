"""Names as people type them, and the sizes that they stand for."""

from __future__ import annotations

from collections import defaultdict

import pytest

from shardmark.ranks.workloads.configurations import VARIANTS, _plain_names, shipped, shipped_name

TYPED = {
    # the owner, upper and lower case, punctuation
    "Qwen/Qwen3-8B": 8.19,
    "qwen3-8b": 8.19,
    "qwen3:8b": 8.19,
    "Qwen 3 8B": 8.19,
    "llama-3.1-8b": 8.03,
    "Llama3.1-8B": 8.03,
    "meta-llama/Meta-Llama-3.1-8B": 8.03,
    "llama-3-70b": 70.6,
    "gpt2": 0.124,
    "gpt-2": 0.124,
    "mistral-7b": 7.25,
    "bert-large-uncased": 0.335,
    "roberta-large": 0.355,
    "whisper-large-v3": 1.54,
    "NousResearch/Llama-2-7b-hf": 6.74,
    # tuned
    "Qwen/Qwen2.5-7B-Instruct": 7.62,
    "Qwen/Qwen2.5-Coder-7B-Instruct": 7.62,
    "Qwen/Qwen2.5-Math-7B": 7.62,
    "Qwen/Qwen2.5-0.5B-Instruct": 0.494,
    "Qwen/Qwen3-4B-Base": 4.02,
    "Qwen/Qwen3-4B-Instruct-2507": 4.02,
    "Qwen/Qwen3-30B-A3B-Thinking-2507": 30.5,
    "Qwen/Qwen3-Coder-30B-A3B-Instruct": 30.5,
    "meta-llama/Llama-3.1-8B-Instruct": 8.03,
    "meta-llama/Llama-3.2-3B-Instruct": 3.21,
    "meta-llama/Llama-3.3-70B-Instruct": 70.6,
    "meta-llama/Llama-2-7b-chat-hf": 6.74,
    "mistralai/Mistral-7B-Instruct-v0.1": 7.24,
    "mistralai/Mistral-7B-Instruct-v0.3": 7.25,
    "mistralai/Mixtral-8x7B-Instruct-v0.1": 46.7,
    "mistralai/Mistral-Nemo-Instruct-2407": 12.2,
    "mistralai/Mistral-Small-24B-Instruct-2501": 23.6,
    "google/gemma-2-9b-it": 9.24,
    "google/gemma-3-1b-it": 1.0,
    "microsoft/Phi-3.5-mini-instruct": 3.82,
    "microsoft/Phi-3-mini-128k-instruct": 3.82,
    "phi-3-mini": 3.82,
    "pythia-1.4b": 1.41,
    "HuggingFaceTB/SmolLM2-1.7B-Instruct": 1.71,
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B": 7.62,
    "deepseek-ai/DeepSeek-R1-Distill-Llama-8B": 8.03,
    "deepseek-ai/DeepSeek-R1-0528": 671,
    "deepseek-ai/DeepSeek-V3-0324": 671,
    # quantized
    "unsloth/Qwen3-14B-unsloth-bnb-4bit": 14.8,
    "unsloth/Meta-Llama-3.1-8B-Instruct-bnb-4bit": 8.03,
    "unsloth/gpt-oss-20b-unsloth-bnb-4bit": 20.9,
    "mlx-community/Qwen3-4B-Instruct-2507-4bit": 4.02,
    "Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4": 7.62,
    "Qwen/Qwen2.5-72B-Instruct-AWQ": 72.7,
    "RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w4a16": 8.03,
    "bartowski/Meta-Llama-3.1-8B-Instruct-GGUF": 8.03,
    "google/gemma-3-27b-it-qat-q4_0-gguf": 27.4,
    "Qwen/Qwen3-8B-FP8": 8.19,
    # families of 2025 and 2026
    "Qwen/Qwen3-Next-80B-A3B-Thinking": 80,
    "Qwen/Qwen3.5-27B": 27,
    "Qwen/Qwen3.5-35B-A3B": 35,
    "Qwen/Qwen2.5-VL-7B-Instruct": 8.29,
    "Qwen/Qwen3-VL-8B-Instruct": 8.77,
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": 109,
    "unsloth/gemma-3-270m-it": 0.268,
    "google/gemma-3-4b-it": 4.3,
    "google/gemma-3-12b-it": 12.2,
    "google/gemma-4-31B-it": 31.3,
    "zai-org/GLM-4.5-Air": 106,
    "zai-org/GLM-4.6": 355,
    "deepseek-ai/DeepSeek-V3.2-Exp": 671,
    "moonshotai/Kimi-K2-Instruct-0905": 1040,
    "openai/gpt-oss-120b": 117,
    "HuggingFaceTB/SmolLM3-3B": 3.08,
    "HuggingFaceTB/SmolLM2-360M-Instruct": 0.362,
    "allenai/OLMo-2-1124-7B-Instruct": 7.3,
    "allenai/Olmo-3-7B-Instruct": 7.3,
    "microsoft/Phi-4-mini-instruct": 3.84,
    "mistralai/Mistral-Small-3.2-24B-Instruct-2506": 24,
    "mistralai/Ministral-3-8B-Instruct-2512": 8.9,
    "ibm-granite/granite-4.0-h-tiny-base": 6.94,
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": 31.6,
    "tiiuae/Falcon-H1-7B-Instruct": 7.59,
    "LiquidAI/LFM2-1.2B": 1.17,
    "zai-org/GLM-4.5V": 107.7,
    "moonshotai/Kimi-K2.5": 1030,
    "Qwen/Qwen3.5-122B-A10B-FP8": 122,
    "unsloth/gemma-3n-E4B-it": 7.85,
    "Apertus-8B": 8.05,
    "swiss-ai/Apertus-70B-Instruct-2509": 70.6,
    "allenai/Olmo-3-7B-Think": 7.3,
    "allenai/Llama-3.1-Tulu-3-8B": 8.03,
    "NousResearch/Hermes-4-70B": 70.6,
    # encoders, pictures, sound, diffusion
    "answerdotai/ModernBERT-base": 0.15,
    "xlm-roberta-large": 0.56,
    "microsoft/deberta-v3-base": 0.184,
    "all-MiniLM-L6-v2": 0.0227,
    "BAAI/bge-large-en-v1.5": 0.335,
    "google/flan-t5-xl": 2.85,
    "google/siglip2-so400m-patch14-384": 1.14,
    "clip-vit-base-patch16": 0.15,
    "facebook/dinov3-vitb16-pretrain-lvd1689m": 0.0857,
    "PekingU/rtdetr_v2_r50vd": 0.0429,
    "openai/whisper-large-v3-turbo": 0.809,
    "openai/whisper-tiny.en": 0.0378,
    "facebook/wav2vec2-base": 0.0944,
    "black-forest-labs/FLUX.2-dev": 32.2,
    "Wan-AI/Wan2.1-T2V-14B": 14.3,
    "stabilityai/stable-diffusion-3.5-large": 8.06,
    "Qwen/Qwen-Image": 20.4,
    "HuggingFaceTB/SmolVLM-500M-Instruct": 0.507,
    "llava-hf/llava-1.5-7b-hf": 7.06,
    # families of before 2024
    "facebook/opt-1.3b": 1.32,
    "bigscience/bloomz-7b1": 7.07,
    "EleutherAI/gpt-j-6B": 6.05,
    "EleutherAI/gpt-neo-2.7B": 2.65,
    "01-ai/Yi-1.5-34B-Chat": 34.4,
    "codellama/CodeLlama-7b-Instruct-hf": 6.74,
    "deepseek-ai/deepseek-llm-7b-chat": 6.91,
    "facebook/bart-large-cnn": 0.406,
    "facebook/nllb-200-distilled-600M": 0.615,
    "google/mt5-base": 0.582,
    "albert-base-v2": 0.0112,
    "google/electra-base-discriminator": 0.11,
    "mistralai/Ministral-8B-Instruct-2410": 8.02,
    # untied embeddings, other sizes of a family, and copies
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": 1.777,
    "agentica-org/DeepScaleR-1.5B-Preview": 1.777,
    "unsloth/gemma-3n-E2B-it-unsloth-bnb-4bit": 5.44,
    "HuggingFaceTB/SmolLM-135M-Instruct": 0.1345,
    "deepseek-coder-6.7b-instruct": 6.74,
    "mistralai/Codestral-22B-v0.1": 22.2,
    "microsoft/Phi-3-medium-128k-instruct": 13.96,
    "tiiuae/Falcon3-7B-Instruct": 7.46,
    "LGAI-EXAONE/EXAONE-4.0-1.2B": 1.28,
    "internlm/internlm2_5-7b-chat": 7.74,
    "EleutherAI/pythia-2.8b-deduped": 2.775,
    "ibm-granite/granite-4.0-350m-base": 0.352,
    "google/codegemma-7b-it": 8.54,
    "meta-llama/Llama-3.2-11B-Vision-Instruct": 10.67,
    "OpenGVLab/InternVL3-8B-Instruct": 7.94,
    "llava-hf/llava-v1.6-mistral-7b-hf": 7.57,
    "HuggingFaceTB/SmolVLM2-2.2B-Instruct": 2.25,
    "google/paligemma2-3b-mix-224": 3.03,
    "google/embeddinggemma-300m": 0.303,
    "bert-large-cased": 0.3336,
    "distilroberta-base": 0.0821,
    "ProsusAI/finbert": 0.1095,
    "google/byt5-small": 0.3,
    "google/pegasus-xsum": 0.5697,
    "facebook/nllb-200-distilled-1.3B": 1.37,
    "Helsinki-NLP/opus-mt-zh-en": 0.078,
    "distil-whisper/distil-large-v3.5": 0.756,
    "facebook/hubert-large-ll60k": 0.3155,
    "facebook/mms-1b-all": 0.963,
    "google/siglip2-large-patch16-512": 0.882,
    "black-forest-labs/FLUX.2-klein-9B": 9.08,
    "flux-dev": 11.9,
    "sd1.5": 0.86,
    "PixArt-alpha/PixArt-Sigma-XL-2-1024-MS": 0.611,
}
"""Names with the published number of parameters, in billions."""
REFUSED = (
    "Qwen/Qwen3-9B",
    "Qwen/Qwen2-57B-A14B",
    "meta-llama/Llama-3.1-9B",
    "google/gemma-5-9b",
    "deepseek-ai/DeepSeek-V5",
    "microsoft/deberta-base",
    "someone/llava-v1.6-vicuna-7b-hf",
    "Qwen/Qwen3-Embedding-8B",
    "mistral-small",
    "Salesforce/blip2-flan-t5-xl",
    "state-spaces/mamba-7b",
    "openai/gpt-oss-7b",
    "bert",
    "8b",
)
"""Names of models with other sizes, or of none."""


@pytest.mark.parametrize("name", TYPED)
def test_names_of_models_that_ship(name: str) -> None:
    model = shipped_name(name)
    assert model is not None
    assert shipped()[model]["parameters"] == pytest.approx(1e9 * TYPED[name], rel=0.02)


@pytest.mark.parametrize("name", REFUSED)
def test_the_sizes_of_another_model_are_not_guessed(name: str) -> None:
    assert shipped_name(name) is None


def test_a_name_is_that_of_one_model() -> None:
    """Without what marks a copy, too, unless the sizes are the same or the version is missing."""
    for count in range(len(VARIANTS) + 1):
        models = defaultdict(set)
        for plain, model in _plain_names(count):
            models[plain].add(model)
        several = {plain for plain, all_models in models.items() if len(all_models) > 1}
        assert several <= {"mistral7b", "magistral-small", "glm4-9b", "phi3-mini"}
    assert shipped_name("mistralai/Magistral-Small-2507") is None
