"""Commands as users type them become starts with another number of ranks."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from shardmark.base.errors import InputError
from shardmark.scripts.command import BOOTSTRAP, check_exists, hooked_environment, parse_command
from tests.programs import output_of


@pytest.mark.parametrize(
    ("command", "ranks", "alone"),
    [
        (
            "torchrun --nproc-per-node 2 train.py --nnodes 3",
            2,
            "torchrun --standalone --nproc-per-node 1 train.py --nnodes 3",
        ),
        (
            "torchrun --nproc_per_node=4 --master_port 29501 -m pkg.train a",
            4,
            "torchrun --standalone --nproc-per-node 1 -m pkg.train a",
        ),
        (
            "python -m torch.distributed.run --nnodes 1 --nproc-per-node 2 t.py",
            2,
            "python -m torch.distributed.run --standalone --nproc-per-node 1 t.py",
        ),
        (
            "accelerate launch --cpu --num_processes 2 t.py",
            2,
            f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node 1 "
            "--no-python accelerate launch --cpu --main_process_port 0 --num_processes 1 t.py",
        ),
        (
            "accelerate launch --multi_gpu --num_processes 2 t.py",
            2,
            f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node 1 "
            "--no-python accelerate launch --main_process_port 0 --num_processes 1 t.py",
        ),
        (
            "python -u t.py --lr 1",
            None,
            "python -u -m torch.distributed.run --standalone --nproc-per-node 1 t.py --lr 1",
        ),
        ("python t.py -n {ranks}", None, "python t.py -n 1"),
        (
            "env RANKS={ranks} python -u -m t",
            None,
            "env RANKS=1 python -u -m t",
        ),
        (
            "torchrun t.py --shards={ranks}",
            None,
            "torchrun --standalone --nproc-per-node 1 t.py --shards=1",
        ),
        (
            "torchrun --nproc-per-node=gpu t.py",
            None,
            "torchrun --standalone --nproc-per-node 1 t.py",
        ),
        (
            "torchrun --nproc_per_node auto --no-python program --steps 3",
            None,
            "torchrun --no-python --standalone --nproc-per-node 1 program --steps 3",
        ),
        (
            "torchrun --max-restarts 0 --nproc-per-node 2 /bin/program sft",
            2,
            "torchrun --max-restarts 0 --standalone --nproc-per-node 1 /bin/program sft",
        ),
        (
            "python -u -X dev -m torch.distributed.run --nproc-per-node 2 t.py",
            2,
            "python -u -X dev -m torch.distributed.run --standalone --nproc-per-node 1 t.py",
        ),
        (
            "python3.11 -W ignore -m torch.distributed.launch --nproc_per_node 2 t.py",
            2,
            "python3.11 -W ignore -m torch.distributed.launch --standalone --nproc-per-node 1 t.py",
        ),
        (
            "uv run --extra gpu torchrun --nproc-per-node 2 t.py",
            2,
            "uv run --extra gpu torchrun --standalone --nproc-per-node 1 t.py",
        ),
        (
            "poetry run python -m pkg.train --lr 1",
            None,
            "poetry run python -m torch.distributed.run --standalone --nproc-per-node 1 -m"
            " pkg.train --lr 1",
        ),
        (
            "uv run t.py",
            None,
            "uv run python -m torch.distributed.run --standalone --nproc-per-node 1 t.py",
        ),
        (
            "conda run -n lab --no-capture-output torchrun --nproc-per-node 2 t.py",
            2,
            "conda run -n lab --no-capture-output torchrun --standalone --nproc-per-node 1 t.py",
        ),
        (
            "nohup env A=1 B=2 torchrun --nproc-per-node 2 t.py",
            2,
            "nohup env A=1 B=2 torchrun --standalone --nproc-per-node 1 t.py",
        ),
        (
            "A=1 /usr/bin/env python t.py",
            None,
            "env A=1 /usr/bin/env python -m torch.distributed.run --standalone --nproc-per-node 1"
            " t.py",
        ),
        (
            "accelerate-launch --cpu --num_processes 2 t.py",
            2,
            f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node 1 "
            "--no-python accelerate-launch --cpu --main_process_port 0 --num_processes 1 t.py",
        ),
    ],
)
def test_a_command_starts_on_another_number_of_ranks(
    command: str, ranks: int | None, alone: str
) -> None:
    parsed = parse_command(command.split())
    assert parsed.ranks == ranks
    assert " ".join(parsed.with_ranks(1)) == alone


def test_accelerate_starts_several_gpu_processes_itself() -> None:
    parsed = parse_command(["accelerate", "launch", "--multi_gpu", "--num_processes", "2", "t.py"])
    words = "accelerate launch --multi_gpu --main_process_port 0 --num_processes 4 t.py"
    assert " ".join(parsed.with_ranks(4)) == words


def test_starts_side_by_side_have_their_own_ports() -> None:
    parsed = parse_command(["deepspeed", "--num_gpus", "2", "t.py"])
    first, second = parsed.with_ranks(1), parsed.with_ranks(1)
    assert first[first.index("--master_port") + 1] != second[second.index("--master_port") + 1]


def test_a_script_runs_by_this_interpreter() -> None:
    words = parse_command(["train.py", "--x"]).with_ranks(2)
    assert words[0] == sys.executable
    assert words[-2:] == ["train.py", "--x"]


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        ("", "empty"),
        ("mpirun -n 2 train.py", "mpirun"),
        ("torchrun --nproc-per-node 2", "a script"),
        ("torchrun --nproc-per-node many train.py", "many"),
        ("nohup", "empty"),
        ("python -c 1", "a script"),
        ("mpirun -n 2 python -u train.py --lr 1", "--ranks N -- python -u train.py --lr 1"),
        ("srun --gpus 2 torchrun --nproc-per-node 2 t.py", " -- torchrun --nproc-per-node 2 t.py"),
        ("bash nowhere.sh", "the line with torchrun"),
        ("torchrun --nnodes 2 --nproc-per-node 2 train.py", "one machine"),
    ],
)
def test_a_command_that_cannot_be_started_is_refused(command: str, problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        parse_command(command.split())


def test_a_command_in_quotation_marks_is_split_unless_it_is_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my train.py").touch()
    words = ["torchrun", "--nproc-per-node", "2", "train.py", "--name", "a b"]
    text = "torchrun --nproc-per-node 2 train.py --name 'a b'"
    assert parse_command([text]) == parse_command(text) == parse_command(words)
    assert parse_command("my train.py").script == ("my train.py",)
    with pytest.raises(InputError, match="No closing quotation; close the quotation"):
        parse_command("train.py 'open")


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("trian.py", r"no file 'trian\.py' in .*; did you mean train\.py\?"),
        (
            "torchrun ../x/tran.py",
            r"no file '\.\./x/tran\.py' in .*; did you mean \.\./x/train\.py",
        ),
        ("python other.txt", r"no file 'other\.txt' in .*; give the script's path"),
        ("train", r"it begins with 'train'; did you mean train\.py\?"),
        ("python -m train.py", r"no module 'train\.py'; name one that `python -m` finds"),
        ("deepspeed --module pkg.train", r"no module 'pkg\.train'; name one"),
        ("torchrun -m", r"no module ''; name one"),
        ("torchrun train.ipynb", r"a notebook; `jupyter nbconvert --to script train\.ipynb`"),
        ("'a b.ipynb'", r"a notebook; `jupyter nbconvert --to script 'a b\.ipynb'` makes"),
    ],
)
def test_a_script_that_is_none_is_answered_with_what_was_meant(
    command: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "x"
    folder.mkdir()
    for name in ("train.py", "train.ipynb", "a b.ipynb"):
        (folder / name).touch()
    monkeypatch.chdir(folder)
    with pytest.raises(InputError, match=message):
        check_exists(parse_command(command))


def test_a_shell_script_is_answered_with_the_command_inside_of_it(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(
        "#!/bin/bash\nset -e\nexport A=1  # setting\nB=2\necho train\n"
        "torchrun --nproc-per-node 2 \\\n    train.py --lr '1 2'\n"
    )
    for words in (["bash", str(script)], [str(script)]):
        with pytest.raises(InputError, match=r"torchrun --nproc-per-node 2 train\.py --lr '1 2'"):
            parse_command(words)


def test_a_console_script_is_a_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "pretrain-it"
    program.write_text(f"#!{sys.executable}\nprint('trained')\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    parsed = parse_command(["pretrain-it", "--steps", "3"])
    assert parsed.script == (str(program), "--steps", "3")
    assert parsed.launcher == "python"


def test_hooks_and_the_sitecustomize_of_the_user_both_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('theirs')")
    (tmp_path / "hook.py").write_text("def install():\n    print('hook')")
    (tmp_path / "torch.py").write_text("print('torch')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    environment = hooked_environment("hook:install", {})
    program = "import importlib.util as i; i.find_spec('torch'); import torch"
    printed = output_of(sys.executable, "-c", program, env=environment)
    assert printed.split() == ["theirs", "torch", "hook"]


def test_fabric_starts_its_ranks_on_a_port_of_their_own() -> None:
    parsed = parse_command(
        ["fabric", "run", "--strategy", "ddp", "--devices=4", "--main_port", "7", "t.py"]
    )
    assert parsed.ranks == 4
    *words, port, devices, count, script = parsed.with_ranks(2)
    assert words == ["fabric", "run", "--strategy", "ddp", "--main_port"]
    assert (devices, count, script) == ("--devices", "2", "t.py")
    assert port != "7"


def test_a_search_path_of_the_command_keeps_the_hooks() -> None:
    for text in ("env A=1 PYTHONPATH=.:lib python t.py", "PYTHONPATH=.:lib python t.py"):
        words = parse_command(text).words
        assert f"PYTHONPATH={BOOTSTRAP}:.:lib" in words
