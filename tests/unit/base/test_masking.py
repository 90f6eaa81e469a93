"""Secrets in commands: masked where they are stored, and nothing else is."""

from __future__ import annotations

import pytest

from shardmark.base.masking import masked_command, masked_commands, shown_command


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("train.py --hub-token hf_abc --lr 0.1", "train.py --hub-token *** --lr 0.1"),
        ("train.py --api-key=abc", "train.py --api-key=***"),
        ("train.py --password 'a b' x", "train.py --password *** x"),
        ("train.py --wandb_key abc --hf_token abc", "train.py --wandb_key *** --hf_token ***"),
        ("WANDB_API_KEY=abc python train.py", "WANDB_API_KEY=*** python train.py"),
        ("train.py hub.token=abc +auth.secret=abc", "train.py hub.token=*** +auth.secret=***"),
        ("train.py --data s3://me:word@host/set", "train.py --data s3://***@host/set"),
        ("train.py --from hf_AbCdEfGhIjKlMnOpQrSt", "train.py --from ***"),
        ("train.py --token 'open", "train.py --token ***"),
    ],
)
def test_secrets_are_masked(command: str, shown: str) -> None:
    assert masked_command(command) == shown
    assert masked_command(shown) == shown


@pytest.mark.parametrize(
    "command",
    [
        "train.py --tokenizer gpt2 --max-tokens 512 --pad-token '<pad>' --eos_token \"</s>\"",
        "train.py  --num-key-value-heads 8 --key image --monkey x --author me --path /data",
        "train.py --token --verbose --use-path yes --passes 3 --pattern '*.txt'",
        "python -m hf_trainer.main --model hf_models/small",
    ],
)
def test_other_words_stay_to_the_letter(command: str) -> None:
    assert masked_command(command) == command


def test_only_commands_of_a_file_are_masked() -> None:
    content = {
        "name": "--token abc",
        "workload": {"name": "script", "command": "train.py --token abc"},
        "matrix": {"variant": {"a": "--api-key abc", "b": ["x", "--lr 1"]}, "world_size": [2]},
    }
    assert masked_commands(content) == {
        "name": "--token abc",
        "workload": {"name": "script", "command": "train.py --token ***"},
        "matrix": {"variant": {"a": "--api-key ***", "b": ["x", "--lr 1"]}, "world_size": [2]},
    }


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("train.py --lr 1", "`train.py --lr 1`"),
        (f"@{'a' * 40} train.py --lr 1", "`train.py --lr 1` in commit aaaaaaa"),
    ],
)
def test_a_command_is_shown_with_its_commit(text: str, shown: str) -> None:
    assert shown_command(text) == shown
